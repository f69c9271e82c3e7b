"""Comparisons of what a program shows: numbers read, texts printed, the value returned, the error at its end."""

from __future__ import annotations

from collections.abc import Sequence

from lagom.extensions.verify.closeness import NUMBER, both_bad, distance, is_near, norm, tolerance
from lagom.extensions.verify.comparison_row import AgreementLevel, ComparisonRow
from lagom.extensions.verify.on_rank.record import Record, RecordedRead
from lagom.extensions.verify.texts import difference


def compare_reads(reference: Record, ranks: Sequence[Record], again: Record | None, epsilon: float) -> ComparisonRow:
    """Compare the numbers that the program read from tensors, up to the first read at another place."""
    if not reference.reads and not any(rank.reads for rank in ranks):
        return ComparisonRow("numbers read", "none", "none", AgreementLevel.UNKNOWN)
    differing: list[tuple[RecordedRead, RecordedRead]] = []
    for rank in ranks:
        for number, (left, right) in enumerate(zip(reference.reads, rank.reads, strict=False)):
            if left.place != right.place:
                break
            allowed = 10 * tolerance(left.step, epsilon)
            if not is_near(left.value, right.value, allowed, 1e-6) and _repeats(left, number, again, allowed):
                differing.append((left, right))
    if not differing:
        return ComparisonRow("numbers read", f"{len(reference.reads)}", f"{len(ranks[0].reads)}", AgreementLevel.AGREES)
    decides = [pair for pair in differing if pair[0].decides or pair[1].decides]
    left, right = (decides or differing)[0]
    places = ", ".join(dict.fromkeys(pair[0].place for pair in decides or differing))
    if decides:
        note = f"the program decides by it ({places}), and each rank has that of its own share"
        return ComparisonRow("numbers read", f"{left.value:.6g}", f"{right.value:.6g}", AgreementLevel.DIFFERS, note)
    note = f"each rank reads that of its own share ({places})"
    return ComparisonRow("numbers read", f"{left.value:.6g}", f"{right.value:.6g}", AgreementLevel.OWN, note)


def _repeats(left: RecordedRead, number: int, again: Record | None, allowed: float) -> bool:
    if again is None or number >= len(again.reads):
        return True
    return again.reads[number].place == left.place and is_near(left.value, again.reads[number].value, allowed, 1e-6)


def compare_prints(reference: Record, first: Record, again: Record | None, epsilon: float) -> ComparisonRow:
    """Compare standard output, except parts that differ between two runs of one process."""
    left, right = reference.printed, first.printed
    if not left and not right:
        return ComparisonRow("printed", "nothing", "nothing", AgreementLevel.UNKNOWN)
    shown = _num_lines(left), _num_lines(right)
    repeat = left if again is None else again.printed
    if len(left.splitlines()) != len(repeat.splitlines()):
        return ComparisonRow(
            "printed", *shown, AgreementLevel.UNKNOWN, "differs between two runs of one process as well"
        )
    line = difference(left, repeat, right, tolerance(len(reference.steps), epsilon))
    if line is None:
        return ComparisonRow("printed", *shown, AgreementLevel.AGREES)
    return ComparisonRow("printed", *shown, AgreementLevel.OWN, f"first in {' '.join(line.split())[:60]!r}")


def _num_lines(text: str) -> str:
    count = len(text.splitlines())
    return f"{count} line{'s' * (count != 1)}"


def compare_results(reference: Record, ranks: Sequence[Record], again: Record | None, epsilon: float) -> ComparisonRow:
    """Compare the return value with ``aggregate`` of the ranks' return values."""
    if not reference.returned and not any(rank.returned for rank in ranks):
        return ComparisonRow("result", "not reached", "not reached", AgreementLevel.UNKNOWN)
    if not (reference.returned and all(rank.returned for rank in ranks)):
        here, there = ("returned", "not all did") if reference.returned else ("went on", "returned")
        return ComparisonRow("result", here, there, AgreementLevel.DIFFERS, "the ranks end elsewhere")
    if any(len(rank.value) != len(reference.value) for rank in ranks):
        return ComparisonRow("result", f"{len(reference.value)} parts", "others", AgreementLevel.DIFFERS)
    allowed = tolerance(len(reference.steps), epsilon)
    weights = [rank.num_samples for rank in ranks]
    weights = weights if any(weights) else [1] * len(ranks)
    repeat = reference.value if again is None or len(again.value) != len(reference.value) else again.value
    place = ""
    for position, left in enumerate(reference.value):
        place = left.decode() if isinstance(left, bytes) and left[:1] in (b"", b"[", b".") else place
        for right in _aggregates([rank.value[position] for rank in ranks], weights):
            if not _are_same(left, repeat[position], right, allowed):
                return ComparisonRow(
                    "result", _short(left), _short(right), AgreementLevel.DIFFERS, f"in {place}" if place else ""
                )
    numbers = [value for value in reference.value if isinstance(value, (int, float))]
    shown = _short(numbers[0]) if numbers else "returned"
    return ComparisonRow("result", shown, shown, AgreementLevel.AGREES)


def _aggregates(held: Sequence[object], weights: Sequence[int]) -> Sequence[object]:
    """Return the mean, as ``aggregate`` computes it, of the program's own floats; else the value of each rank."""
    numbers = [value for value in held if isinstance(value, (int, float))]
    if len(numbers) < len(held) or not any(isinstance(value, float) for value in held) or len(set(numbers)) == 1:
        return held
    return [sum(weight * value for weight, value in zip(weights, numbers, strict=True) if weight) / sum(weights)]


def _are_same(left: object, repeat: object, right: object, allowed: float) -> bool:
    """Return whether ``right`` equals ``left``; True as well if a second run's ``repeat`` does not, as with times."""
    if isinstance(left, str) and isinstance(repeat, str) and isinstance(right, str):
        return difference(left, repeat, right, allowed) is None
    return _are_near(left, right, allowed) or not _are_near(left, repeat, allowed)


def _are_near(left: object, right: object, allowed: float) -> bool:
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return is_near(left, right, allowed, 1e-9)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return distance(left, right) <= allowed * norm(left) + 1e-12 or both_bad(left, right)
    return left == right


def compare_ends(reference: Record, ranks: Sequence[Record], again: Record | None) -> ComparisonRow:
    """Compare the exceptions that ended the program."""
    errors = [reference.error, *(rank.error for rank in ranks)]
    if not any(errors):
        return ComparisonRow("ends with", "", "", AgreementLevel.UNKNOWN)
    shown = _short(errors[0] or "no error"), _short(next(filter(None, errors[1:]), "no error"))
    words = {NUMBER.sub("#", error) for error in errors}
    if len(words) == 1 or (again is not None and NUMBER.sub("#", again.error) != NUMBER.sub("#", reference.error)):
        return ComparisonRow("ends with", *shown, AgreementLevel.UNKNOWN, "the same error")
    return ComparisonRow("ends with", *shown, AgreementLevel.DIFFERS)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return f"{value[0]:.6g}, …" if len(value) > 1 else _short(value[0])
    text = " ".join(str(value).split())
    return text if len(text) <= 24 else text[:23] + "…"
