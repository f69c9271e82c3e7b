"""``probe``: find out whether a module computes each row of its batch independently, so that ranks can share rows.

See Note [Probe].
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from lagom.forward.rows.backward_probe import BackwardProbe, KeptInputs, MadeLeaves, has_checkpoint
from lagom.forward.rows.comparison import are_close, compare, compare_buffers, drop_rows, tolerance_for
from lagom.forward.rows.inner_losses import BlockLosses, ChangedRowLosses, Sums, WholeLosses, compare_losses
from lagom.forward.rows.input_reads import InputReadsRecorder
from lagom.forward.rows.output_memory import find_bases
from lagom.forward.rows.recorder import (
    AnsweredReads,
    BatchStatistics,
    BlockRecorder,
    Recorder,
    bounds_check,
)
from lagom.forward.rows.restore import ChangedError, ModuleState, copy_buffers, parameter_checksums, restored_state
from lagom.forward.rows.split_candidate import (
    PLAIN,
    SplitCandidate,
    SplitFinding,
    check_call,
    failing_as,
    is_batch,
    like_given,
    silent,
)
from lagom.forward.rows.whole_batch import RowBlock
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.inspection.reads import class_name, describe, is_tensor
from lagom.patching.dynamo import num_compilations
from lagom.random_states import equal_random_states, random_states
from lagom.run_state.memory_layout import memory_order
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from lagom.forward.rows.row_places import RowPlace


def probe(
    candidate: SplitCandidate,
    finding: SplitFinding,
    num_blocks: int,
    statistics: Callable[[BatchStatistics], Any],
    *,
    repeated: bool = False,
) -> None:
    """Complete ``finding``: run the module on the whole batch and on its blocks, and compare. Restore the state.

    Set ``finding.sliced`` if all outputs agree; otherwise set ``finding.reason``.

    Args:
        statistics: returns a context manager in which BatchNorm records, or uses, the given statistics.
        repeated: whether one process will run all blocks (micro-batches), so that a run must not change any state.

    Raises:
        ChangedError: when a forward has changed parameters, of which no copy is kept, or what cannot be restored.
    """
    try:
        if candidate.is_uniform:
            raise NotByRowsError(WholeReason.EQUAL_ROWS)
        check_call(candidate)
        # Compiled code does not call single operations, so that sums in it would not be seen.
        sums = Sums.NONE if num_compilations() else Sums.ALL
        _compare_by(partial(_compare, candidate, finding, num_blocks, statistics, repeated), sums)
        finding.sliced = True
    except NotByRowsError as error:
        finding.reason = error.reason
    except ChangedError:
        raise
    except Exception as error:
        has_memory = wanted_bytes(error) is None
        failure = WholeReason.FAILS_AGAIN.filled(error=describe(error))
        finding.reason = failure if has_memory else WholeReason.NO_MEMORY.filled()


class _SumError(NotByRowsError):
    """A forward cannot be split with sums and means as losses; perhaps it can with ``others``."""

    def __init__(self, error: NotByRowsError, others: Sums) -> None:
        super().__init__(error.reason.reason)
        self.reason = error.reason
        self.others = others


def _compare_by(compare: Callable[[Sums], None], sums: Sums) -> None:
    """Call ``compare``, with other sums and means as losses as long as it fails.

    A forward may read the sum of a mask, or add its rows only for their gradient (``autograd.grad(y.sum(), x)``).
    """
    try:
        compare(sums)
    except _SumError as error:
        try:
            _compare_by(compare, error.others)
        except NotByRowsError as other:
            # Without sums the reason is often that the output has no rows, which tells a person less.
            raise (error if error.others is Sums.NONE else other) from None


def _compare(
    candidate: SplitCandidate,
    finding: SplitFinding,
    num_blocks: int,
    statistics: Callable[[BatchStatistics], Any],
    repeated: bool,
    sums: Sums,
) -> None:
    """Run the module on the whole batch and on its blocks, and compare; restore the state.

    Raises:
        NotByRowsError: if the module does not compute its rows one by one.
    """
    with (
        restored_state(candidate.module, candidate.inside) as state,
        _unchanged_parameters(candidate.module),
        bounds_check(candidate.device),
    ):
        if repeated:
            candidate = replace(candidate, check=_unchanged_check(finding, state), is_common=False)
        comparison = _Comparison(candidate, finding, statistics, state, sums)
        try:
            outputs = comparison.run_whole()
            buffers, key = copy_buffers(candidate.inside), state.key()
            comparison.run_again(outputs)
            comparison.run_blocks(num_blocks, outputs, buffers, key)
        except NotByRowsError as error:
            if not comparison.losses.has_added:
                raise
            reads = comparison.losses.has_added_constants and error.reason.reason is WholeReason.READS_LOSS
            raise _SumError(error, Sums.OF_PARAMETERS if reads else Sums.NONE) from error


@contextmanager
def _unchanged_parameters(module: nn.Module) -> Iterator[None]:
    before = parameter_checksums(module)
    try:
        yield
    finally:
        if parameter_checksums(module) != before:
            raise ChangedError(
                f"the forward of {type(module).__name__} changes parameters. lagom has run it once more, to look "
                "whether ranks or micro-batches can share out its rows, and cannot put them back. Change them after "
                "the optimizer's step, or keep them as buffers, or use batches='split', evaluation='replicated' and "
                "no micro_batches for this program"
            )


class _Comparison:
    """Runs a forward on the whole batch and on its blocks, compares them, and completes the finding."""

    def __init__(
        self,
        candidate: SplitCandidate,
        finding: SplitFinding,
        statistics: Callable[[BatchStatistics], Any],
        state: ModuleState,
        sums: Sums,
    ) -> None:
        self._candidate = candidate
        self._finding = finding
        self._statistics = statistics
        self._state = state
        self._noted = BatchStatistics()
        # Copies, since the forward may change its input in place, and the input is the program's.
        self._given = _copy_leaves(candidate)
        self._parameters = list(candidate.module.parameters())
        inputs = [leaf for leaf in self._given if is_batch(leaf, candidate.rows)]
        reads = InputReadsRecorder(self._given, candidate.inside) if candidate.is_common else None
        self._recorder = Recorder(inputs, self._parameters, reads)
        self.losses = WholeLosses(self._recorder, candidate.rows, sums)
        self._backwards = BackwardProbe(self._parameters, tolerance_for(candidate))
        self._made = MadeLeaves()
        self._block_losses: list[BlockLosses] = []
        self._parts: list[list[Any]] = []
        self._recorders: list[BlockRecorder] = []

    def run_whole(self) -> list[Any]:
        """Run the forward on the whole batch, on copies of its input; return its outputs."""
        candidate, finding, given, state = self._candidate, self._finding, self._given, self._state
        versions, kept = _tensor_versions(given), KeptInputs(given)

        def look_at(outputs: list[Any], _: object) -> None:
            self._backwards.look_at(outputs)
            self._made.look_at(outputs, given)
            self._recorder.has_checkpoints |= has_checkpoint(outputs)

        losses = self.losses
        with self._statistics(self._noted), losses.entered() if candidate.is_common else nullcontext():
            outputs, finding.factors, finding.bases, finding.spec = _run_forward(
                candidate, self._recorder, given, candidate.rows, self._noted, finding.places, look_at
            )
        finding.losses = list(losses.losses)
        if any(finding.losses) and (self._recorder.has_checkpoints or self._backwards.is_needed):
            raise NotByRowsError(WholeReason.LOSS_AGAIN)
        kept.check()
        self._made.compare()
        if _tensor_versions(given) != versions:
            raise NotByRowsError(WholeReason.CHANGES_INPUT)
        if not {"random", "numpy"}.isdisjoint(state.changed_generators()):
            raise NotByRowsError(WholeReason.DRAWS_OUTSIDE_TORCH)
        finding.makes_leaves = self._made.are_made
        finding.reads, finding.input_reads = self._recorder.reads, self._recorder.input_reads()
        finding.needs_mode = self._recorder.needs_mode
        finding.changes_buffers = bool(self._noted.running) or not state.has_same_buffers()
        finding.orders = [memory_order(one) if is_tensor(one) else None for one in outputs]
        if finding.repeats and self._noted.noted:
            raise NotByRowsError(WholeReason.BATCH_STATISTICS)
        return outputs

    def run_again(self, outputs: list[Any]) -> None:
        """Run the forward on the whole batch with a changed row, and its backward if it is the program's own."""
        self._begin()
        with self._statistics(self._noted):
            _check_changed_row(self._candidate, outputs, self._finding, self._noted, self._state, self.losses)
            if self._backwards.is_needed:
                self._begin()
                with silent(), failing_as(WholeReason.BACKWARD_FAILS):
                    self._backwards.run_whole(self._candidate, _copy_leaves(self._candidate), self._finding.places)

    def run_blocks(self, num_blocks: int, outputs: list[Any], buffers: Any, key: object) -> None:
        """Run the forward on each block; compare the outputs with ``outputs`` of the whole batch, and the state."""
        parts = []
        for block in RowBlock(0, num_blocks, self._candidate.rows).all_blocks:
            self._begin()
            parts.append(self._run_block(block))
            compare_buffers(buffers, copy_buffers(self._candidate.inside), self._noted)
            if self._state.key() != key:
                raise NotByRowsError(WholeReason.LEAVES_OTHER_VALUES)
        self._backwards.compare()
        self._compare_reads()
        if any(self._finding.losses) and any(part.numbers != self._recorder.numbers for part in self._recorders):
            raise NotByRowsError(WholeReason.MIXES_ROWS)
        compare_losses(self._finding.losses, self._block_losses, tolerance_for(self._candidate))
        compare(self._finding, outputs, parts, tolerance_for(self._candidate))

    def _run_block(self, block: RowBlock) -> list[Any]:
        candidate, finding = self._candidate, self._finding
        leaves = candidate.cut_leaves(block)
        self._parts.append(leaves)
        inputs = [leaf for leaf in leaves if is_batch(leaf, block.num_mine)]
        reads = InputReadsRecorder(leaves, candidate.inside) if candidate.is_common else None
        answers = finding.input_reads.answers(finding.reads)
        part = BlockRecorder(inputs, self._parameters, block, self._recorder.drawn, finding.axes, answers, reads)
        self._recorders.append(part)

        def look_at(outputs: list[Any], factors: list[int | None]) -> None:
            self._backwards.run_block(outputs, factors, leaves, block)
            self._made.look_at(outputs, leaves)

        failure = WholeReason.FAILS_AFTER_READS if finding.input_reads.reads else WholeReason.FAILS_ON_PART
        losses = BlockLosses(finding.losses, block, part)
        self._block_losses.append(losses)
        with self._statistics(self._noted), losses.entered(), failing_as(failure):
            outputs, factors, bases, spec = _run_forward(
                candidate, part, leaves, block.num_mine, self._noted, finding.places, look_at
            )
        self._made.compare()
        same = spec == finding.spec and factors == finding.factors and bases == finding.bases
        if not same or len(part.drawn) != len(self._recorder.drawn):
            raise NotByRowsError(WholeReason.OTHER_OUTPUTS)
        finding.multiples |= part.multiples
        if part.reads != self._recorder.reads or not finding.input_reads.learn(part.input_reads()):
            raise NotByRowsError(WholeReason.READS_OTHERS)
        return outputs

    def _compare_reads(self) -> None:
        """Check that the numbers that the forward reads follow from those of the blocks, and are of their rows."""
        reads, modules = self._finding.input_reads, self._candidate.inside
        if not reads.reads:
            return
        whole = reads.rows(self._given, modules)
        parts = [reads.rows(leaves, modules) for leaves in self._parts]
        if whole is None or None in parts or reads.combine(self._parts, modules) != reads.values:
            raise NotByRowsError(WholeReason.READS_NOT_BY_ROWS)
        for one, others in zip(whole, zip(*filter(None, parts), strict=True), strict=True):
            if not one.dim() or not all(part.dim() for part in others) or not torch.equal(torch.cat(others), one):
                raise NotByRowsError(WholeReason.READS_NOT_BY_ROWS)

    def _begin(self) -> None:
        self._noted.replay()
        self._state.restore()


def _unchanged_check(finding: SplitFinding, state: ModuleState) -> Callable[[], None]:
    """Return a function that checks that a run changed no state, and drew as many numbers as the first run.

    It raises a NotByRowsError if not, and sets ``finding.repeats`` when the first run has changed no state.
    """
    ends: list[dict[str, Any]] = []

    def check() -> None:
        if not state.is_unchanged():
            raise NotByRowsError(WholeReason.CHANGES_STATE)
        finding.repeats = True
        ends.append(random_states())
        if not equal_random_states(ends[0], ends[-1]):
            raise NotByRowsError(WholeReason.DRAWS_OTHER_AMOUNTS)

    return check


def _check_changed_row(
    candidate: SplitCandidate,
    outputs: list[Any],
    finding: SplitFinding,
    noted: BatchStatistics,
    state: ModuleState,
    losses: WholeLosses,
) -> None:
    """Check that a row of NaN changes no other row: NaN spreads even if rows are mixed with a weight of zero.

    Where the forward fails on NaN, which may be no valid input (an index, a probability), another row of the batch
    takes the place of the row.
    """
    leaves, row = list(candidate.leaves), candidate.rows // 2
    for index, leaf in enumerate(leaves):
        if is_batch(leaf, candidate.rows) and (leaf.is_floating_point() or leaf.is_complex()):
            leaves[index] = leaf.detach().clone()
            leaves[index][row] = float("nan")
    if all(one is other for one, other in zip(leaves, candidate.leaves, strict=True)):
        return
    try:
        _compare_other_rows(candidate, leaves, row, outputs, finding, losses)
    except NotByRowsError:
        raise
    except Exception as error:
        if wanted_bytes(error) is not None:
            raise
        noted.replay()
        state.restore()
        with failing_as(WholeReason.FAILS_WITH_OTHER_ROW):
            _compare_other_rows(candidate, _with_other_row(candidate, row), row, outputs, finding, losses)


def _with_other_row(candidate: SplitCandidate, row: int) -> list[Any]:
    """Return the leaves with the next row that differs from ``row`` in its place."""
    batches = [leaf for leaf in candidate.leaves if is_batch(leaf, candidate.rows)]
    others = [(row + step) % candidate.rows for step in range(1, candidate.rows)]
    other = next((one for one in others if any(not torch.equal(leaf[row], leaf[one]) for leaf in batches)), row)
    leaves = list(candidate.leaves)
    for index, leaf in enumerate(leaves):
        if is_batch(leaf, candidate.rows):
            leaves[index] = leaf.detach().clone()
            leaves[index][row] = leaf.detach()[other]
    return leaves


def _compare_other_rows(
    candidate: SplitCandidate,
    leaves: list[Any],
    row: int,
    outputs: list[Any],
    finding: SplitFinding,
    losses: WholeLosses,
) -> None:
    """Run the forward on ``leaves``, in which only ``row`` differs, and compare the outputs of all other rows."""
    answers = finding.input_reads.answers(finding.reads)
    with (
        silent(),
        ChangedRowLosses(losses, row, tolerance_for(candidate)).entered(),
        AnsweredReads(answers) if finding.input_reads.reads else nullcontext(),
    ):
        repeated = candidate.outputs(leaves, finding.places)[0]
    candidate.check()
    for whole, other, factor in zip(outputs, repeated, finding.factors, strict=True):
        if is_tensor(whole):
            own = (0, 0) if factor is None else (row * factor, (row + 1) * factor)
            if not are_close(drop_rows(other.detach(), *own), drop_rows(whole, *own), tolerance_for(candidate)):
                raise NotByRowsError(WholeReason.MIXES_ROWS)


def _run_forward(
    candidate: SplitCandidate,
    recorder: Recorder,
    leaves: list[Any],
    rows: int,
    noted: BatchStatistics,
    places: Sequence[RowPlace | None],
    look: Callable[[list[Any], list[int | None]], None],
) -> tuple[list[Any], list[int | None], list[int | None], Any]:
    """Run the forward; return copies of its outputs, their rows per input row, their bases and their structure.

    Args:
        places: where each output has its rows.
        look: called with the outputs, while they still have their graph, and with their rows per input row.
    """
    with silent() as said, recorder.entered(), recorder.refuse_reads():
        outputs, spec = candidate.outputs(leaves, places)
    candidate.check()
    if said.getvalue():
        raise NotByRowsError(WholeReason.PRINTS)
    factors = [_rows_per_input_row(output, recorder, rows) for output in outputs]
    bases = find_bases(outputs, factors, leaves)
    look(outputs, factors)
    # Copy the outputs and drop them, so that storages that are still alive afterwards are kept by the program.
    copies = [output.detach().clone() if is_tensor(output) else output for output in outputs]
    outputs.clear()
    known = chain(candidate.module.parameters(), candidate.module.buffers(), *noted.noted)
    if recorder.keeps_results(known):
        raise NotByRowsError(WholeReason.KEEPS_RESULT)
    return copies, factors, bases, spec


def _rows_per_input_row(output: Any, recorder: Recorder, rows: int) -> int | None:
    if not is_tensor(output):
        if not issubclass(type(output), PLAIN):
            raise NotByRowsError(WholeReason.UNKNOWN_OUTPUT, name=class_name(output))
        return None
    if not recorder.follows_input(output):
        return None
    if output.layout != torch.strided or output.dim() == 0 or output.shape[0] == 0 or output.shape[0] % rows:
        raise NotByRowsError(WholeReason.OUTPUT_WITHOUT_ROWS, shape=tuple(output.shape), rows=rows)
    return int(output.shape[0]) // rows


def _copy_leaves(candidate: SplitCandidate) -> list[Any]:
    return [like_given(leaf.detach().clone(), leaf) if is_tensor(leaf) else leaf for leaf in candidate.leaves]


def _tensor_versions(leaves: list[Any]) -> list[int | None]:
    return [leaf._version if is_tensor(leaf) and not leaf.is_inference() else None for leaf in leaves]


# Note [Probe]
#
# A forward is sliced only if this changes nothing but the speed, and a probe shows this. A module's first call with
# inputs of a kind runs whole, and shows how much work it is. If the work is worth sharing, the module is then called
# again on a part of the batch. A module that cannot be called twice fails here, after the program's own call. Before
# the program's second call, every rank runs the forward on the whole batch, and then on the blocks of all ranks, one
# after the other. (For micro-batches, the probe comes before the first call.) All ranks probe the same blocks without
# an exchange, so a forward that fails on a block fails on all ranks; then they exchange their findings, and follow the
# first rank that has a reason against slicing. The outputs must agree, and moreover:
#
# - Nothing computed from the input may stay behind in an attribute, a list or a closure, where the program would find a
#   part of the batch. Weak references to the storages of all results show what is alive after the output is gone.
# - A row of NaN in floating-point inputs must not change other rows. NaN spreads even through a mean over rows whose
#   weight is still zero. A forward that fails on NaN gets a copy of another row instead.
# - The forward must not read numbers of its input (item(), numpy(), masks that select), since it might branch on them,
#   and take another way with another batch. Nor may it draw from Python's or numpy's generators. Other numbers that it
#   reads (a buffer's, or torch's random numbers) must be the same at each sliced call; see Note [Other ways] in
#   sliced_forward.py.
# - Buffers must be equal afterwards, except BatchNorm's, whose statistics are the whole batch's in each block. Plain
#   values that the forward leaves in attributes, or in what it can see, must be equal, too (a number of rows is not).
# - Random draws must have a fixed count for each row; see ``Draws``.
# - The program's hooks and prints would see a part of the batch, so there may be none.
# - A backward that is not torch's own is compared too; see Note [Backwards of programs] in backward_probe.py.
#
# A batch of equal rows (a warm-up with zeros) shows nothing, so the next batch is probed instead. Parameters that are
# almost zero are enlarged during the probe: a gate that starts closed would hide a coupling of rows that shows later.
# Random numbers, buffers, attributes and the objects that a forward can see are restored, each apart, and only what has
# changed; see Note [Looks at objects] in inspection/reads.py. If one cannot be copied, nothing is run. Parameters and
# arrays over 1 MiB are not restored, as a copy might not fit. A module whose own calls change its parameters (momentum
# encoders) is recognised by its first calls, and not probed; if a probe changes them nevertheless, this is an error.
