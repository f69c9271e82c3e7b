"""``compare``: compares the ranks' rehearsal with that of one process, in a row for each quantity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lagom.extensions.verify.closeness import both_bad, difference, distance, is_near, norm, tolerance
from lagom.extensions.verify.comparison_row import AgreementLevel, ComparisonRow
from lagom.extensions.verify.on_rank.record import Record, RecordedBatch, RecordedLeaf
from lagom.extensions.verify.shown import compare_ends, compare_prints, compare_reads, compare_results


def compare(reference: Record, ranks: Sequence[Record], again: Record | None = None) -> list[ComparisonRow]:
    """Return rows for everything that a rehearsal shows.

    Args:
        reference: the record of one process.
        ranks: the records of all ranks, in order.
        again: the record of a second run of one process: numbers read, texts, results and errors that differ from
            ``reference`` cannot be expected to agree.
    """
    epsilon = _epsilon(reference)
    left_out = {number for rank in ranks for number in reference.leaves if _is_own_data(number, reference, rank)}
    rows = [_losses(reference, ranks), _gradients(reference, ranks, left_out), _parameters(reference, ranks, left_out)]
    trained = max(row.level for row in rows) < AgreementLevel.DIFFERS
    rows += [_samples(reference, ranks, trained), _evaluations(ranks), compare_reads(reference, ranks, again, epsilon)]
    rows += [
        compare_prints(reference, ranks[0], again, epsilon),
        compare_results(reference, ranks, again, epsilon),
        compare_ends(reference, ranks, again),
        _work(ranks),
    ]
    return rows


def agreement_level(rows: Sequence[ComparisonRow]) -> AgreementLevel:
    """Return the level of the worst row."""
    return max((row.level for row in rows), default=AgreementLevel.UNKNOWN)


def compare_rounding(reference: Record, ranks: Sequence[Record], control: Record) -> ComparisonRow:
    """Set the differences of rank 0 beside those of ``control``: one process that rounds otherwise.

    Both add the same floats in another order than ``reference``, so their differences have the same size if nothing is
    wrong.
    """
    threads, ranked = (
        f"{_loss_error(reference, other):.0e} loss, {_way_error(reference, other):.0e} weights"
        for other in (control, ranks[0])
    )
    note = "relative; left: one process with other threads, and forwards in two halves"
    return ComparisonRow("rounding", threads, ranked, AgreementLevel.UNKNOWN, note)


def is_rounded(reference: Record, ranks: Sequence[Record]) -> bool:
    """Return whether losses or trained weights of rank 0 differ from those of one process at all."""
    return _loss_error(reference, ranks[0]) > 0 or _way_error(reference, ranks[0]) > 0


def _loss_error(reference: Record, other: Record) -> float:
    """Return the largest difference of a loss, relative to the largest loss of ``reference``."""
    largest = max((abs(step.loss) for step in reference.steps if math.isfinite(step.loss)), default=0.0)
    errors = [abs(left.loss - right.loss) for left, right in zip(reference.steps, other.steps, strict=False)]
    return max((error for error in errors if math.isfinite(error)), default=0.0) / largest if largest else 0.0


def _way_error(reference: Record, other: Record) -> float:
    """Return the difference of all parameters' movements, relative to the movement in ``reference``."""
    pairs = [(leaf, other.leaves[number]) for number, leaf in reference.leaves.items() if number in other.leaves]
    moved = norm(distance(leaf.start, leaf.end) for leaf, _ in pairs)
    error = norm(
        distance(difference(leaf.end, leaf.start), difference(their.end, their.start)) for leaf, their in pairs
    )
    return error / moved if moved and math.isfinite(error) else 0.0


def _losses(reference: Record, ranks: Sequence[Record]) -> ComparisonRow:
    mine = [step.loss for step in reference.steps]
    counts = [len(rank.steps) for rank in ranks]
    theirs: list[float] = []
    for i in range(min(counts, default=0)):
        weights = [(rank.steps[i].weight, rank.steps[i].loss) for rank in ranks]
        # A rank without a sample of the batch has weight 0; its loss, of a copied sample, may be NaN and is left out.
        theirs.append(sum(weight * loss for weight, loss in weights if weight) / len(ranks))
    if not mine and not any(counts):
        return ComparisonRow("losses", "no backward", "no backward", AgreementLevel.UNKNOWN)
    shown = _span(mine), _span(theirs)
    if set(counts) != {len(mine)}:
        told = " and ".join(str(count) for count in sorted(set(counts)))
        return ComparisonRow(
            "losses", *shown, AgreementLevel.DIFFERS, f"the ranks ran {told} backwards, one process {len(mine)}"
        )
    epsilon, largest = _epsilon(reference), 0.0
    for i, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        largest = max(largest, abs(left))
        if not is_near(left, right, tolerance(i, epsilon), 0.1 * largest):
            return ComparisonRow(
                "losses",
                *shown,
                AgreementLevel.DIFFERS,
                _factor(left, right, len(ranks)) or f"from backward {i + 1} on",
            )
    return ComparisonRow("losses", *shown, AgreementLevel.AGREES, f"in {len(mine)} backwards")


def _factor(left: float, right: float, world_size: int) -> str:
    if world_size > 1 and left and abs(right / left * world_size - 1) < 0.1:
        return f"1/{world_size} of one process's: the loss is a sum over the batch, not a mean"
    return ""


def _is_own_data(number: int, reference: Record, rank: Record) -> bool:
    """Return whether the leaf is the rank's part of a batch: no parameter, and other data than in one process."""
    mine, theirs = reference.leaves[number], rank.leaves.get(number)
    if theirs is None or mine.is_parameter:
        return False
    return theirs.is_data or mine.shape != theirs.shape or distance(mine.start, theirs.start) > 0


def _gradients(reference: Record, ranks: Sequence[Record], left_out: set[int]) -> ComparisonRow:
    epsilon, worst = _epsilon(reference), 0.0
    count = min([len(reference.steps), *(len(rank.steps) for rank in ranks)])
    for i in range(count):
        expected = reference.steps[i].gradients
        whole = norm(value for sketch in expected.values() for value in sketch)
        floor = min(64 * epsilon * 1.5**i, 0.05) * whole
        for rank in ranks:
            for number in sorted((expected.keys() | rank.steps[i].gradients.keys()) - left_out):
                left, right = expected.get(number, ()), rank.steps[i].gradients.get(number, ())
                error, size = distance(left, right), norm(left)
                if not error <= tolerance(i, epsilon) * size + floor and not both_bad(left, right):
                    told = f"{error / size:.0%} off" if size else "not zero"
                    where = f"from backward {i + 1} on, first in {_name(number, ranks, reference)}"
                    return ComparisonRow("gradients", "", told, AgreementLevel.DIFFERS, where)
                worst = max(worst, error / whole if whole else 0.0)
    if not count:
        return ComparisonRow("gradients", "none", "none", AgreementLevel.UNKNOWN)
    return ComparisonRow("gradients", "", f"{worst:.0e} off at most", AgreementLevel.AGREES)


def _parameters(reference: Record, ranks: Sequence[Record], left_out: set[int]) -> ComparisonRow:
    worst, num_moved = 0.0, 0
    allowed = tolerance(len(reference.steps), _epsilon(reference))
    for number, leaf in reference.leaves.items():
        if number in left_out or _is_noise(number, leaf, reference):
            continue
        moved = distance(leaf.start, leaf.end)
        num_moved += moved > 0
        for rank in ranks:
            other = rank.leaves.get(number)
            if other is None:
                note = f"{leaf.name} is trained in one process and not on the ranks"
                return ComparisonRow("parameters", "", "", AgreementLevel.DIFFERS, note)
            if distance(leaf.start, other.start) > 1e-6 * norm(leaf.start) + 1e-12:
                note = f"{_name(number, ranks, reference)} starts from other values"
                return ComparisonRow("parameters", "", "", AgreementLevel.DIFFERS, note)
            error = distance(difference(leaf.end, leaf.start), difference(other.end, other.start))
            if not error <= allowed * moved + 64 * leaf.epsilon * norm(leaf.start) and not both_bad(
                leaf.end, other.end
            ):
                told = f"{error / moved:.0%} of their way off" if moved else "moved"
                return ComparisonRow(
                    "parameters", "", told, AgreementLevel.DIFFERS, f"first {_name(number, ranks, reference)}"
                )
            worst = max(worst, error / moved if moved else 0.0)
    if not num_moved:
        return ComparisonRow("parameters", "did not move", "did not move", AgreementLevel.UNKNOWN)
    return ComparisonRow(
        "parameters", f"{num_moved} tensors moved", f"{worst:.0e} of their way off at most", AgreementLevel.AGREES
    )


def _is_noise(number: int, leaf: RecordedLeaf, reference: Record) -> bool:
    """Return whether the leaf's gradients are only rounding errors, like those of a bias before BatchNorm.

    Adam makes full steps even from such gradients.
    """
    has_noise = False
    for step in reference.steps:
        if number in step.gradients:
            has_noise = True
            whole = norm(value for sketch in step.gradients.values() for value in sketch)
            if norm(step.gradients[number]) > min(256 * leaf.epsilon, 0.01) * whole:
                return False
    return has_noise


def _samples(reference: Record, ranks: Sequence[Record], trained: bool) -> ComparisonRow:
    if not reference.batches:
        return ComparisonRow("samples", "no data loader", "no data loader", AgreementLevel.UNKNOWN)
    numbered = [{batch.number: batch for batch in rank.batches} for rank in ranks]
    num_one = num_ranks = 0
    differs = ""
    for batch in reference.batches:
        theirs = [held[batch.number] for held in numbered if batch.number in held]
        counted = _counted(theirs)
        num_one += len(batch.rows)
        num_ranks += counted.total()
        if counted != Counter(batch.rows) and not differs:
            differs = _how_samples_differ(batch, counted, theirs)
    shown = f"{num_one} in {len(reference.batches)} batches", f"{num_ranks} in all"
    if not differs:
        return ComparisonRow("samples", *shown, AgreementLevel.AGREES, "each as often as in one process")
    # If the training agrees, the samples were right and only look different, for example because they contain times.
    return ComparisonRow(
        "samples", *shown, AgreementLevel.UNKNOWN if trained and reference.steps else AgreementLevel.DIFFERS, differs
    )


def _counted(batches: Sequence[RecordedBatch]) -> Counter[bytes]:
    if batches and not batches[0].shared:
        return Counter(batches[0].rows)
    return Counter(row for batch in batches for row in batch.rows)


def _how_samples_differ(batch: RecordedBatch, counted: Counter[bytes], theirs: Sequence[RecordedBatch]) -> str:
    if counted.total() != len(batch.rows):
        return f"batch {batch.number[1] + 1} of pass {batch.number[0] + 1} has other samples"
    if any(seen.shapes != batch.shapes for seen in theirs if seen.rows):
        return "as many, of other shapes: what is made of a whole batch, such as padding by a collate_fn, is of a share"
    return "as many, with other contents"


def _evaluations(ranks: Sequence[Record]) -> ComparisonRow:
    """Find passes without a backward in which ranks saw their shares as in training."""
    for number, one in enumerate(ranks[0].passes):
        if one.is_dealt and one.num_after == one.num_before:
            note = f"pass {number + 1} over a loader runs no backward; where it begins, it looks like training"
            return ComparisonRow("evaluation", "whole batches", "shares of them", AgreementLevel.DIFFERS, note)
    return ComparisonRow("evaluation", "", "", AgreementLevel.UNKNOWN)


def _work(ranks: Sequence[Record]) -> ComparisonRow:
    told = "split" if any(rank.shared for rank in ranks) else "not split"
    notes = "; ".join(dict.fromkeys(note for rank in ranks for note in rank.notes))
    return ComparisonRow("work", "", told, AgreementLevel.UNKNOWN, notes)


def _epsilon(reference: Record) -> float:
    return max((leaf.epsilon for leaf in reference.leaves.values()), default=1.2e-7)


def _name(number: int, ranks: Sequence[Record], reference: Record) -> str:
    # A single rank does not keep the modules, which know the names.
    for record in (*ranks, reference):
        if number in record.leaves:
            return record.leaves[number].name
    return f"tensor {number}"


def _span(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"{values[0]:.6g}" if len(values) == 1 else f"{values[0]:.6g} … {values[-1]:.6g}"
