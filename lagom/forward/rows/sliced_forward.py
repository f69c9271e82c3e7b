"""``SlicedRuns``: run forwards on the rows of a rank, and gather their outputs. See Note [Other ways]."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lagom.accelerators import global_generator, is_accelerator, is_initialized
from lagom.errors import LagomError
from lagom.forward.rows.backward_probe import find_unread
from lagom.forward.rows.draws import BranchMismatchError, Draws
from lagom.forward.rows.inner_losses import RankLosses
from lagom.forward.rows.output_memory import as_kind_of, view_like
from lagom.forward.rows.restore import copy_buffers, restore_buffers
from lagom.forward.rows.row_functions import gather_blocks, slice_rows
from lagom.forward.rows.split_candidate import SplitCandidate, SplitFinding, is_batch, sample_bytes
from lagom.forward.rows.whole_batch import Gatherer, RowBlock, RowExchange, UnequalInputError, row_block
from lagom.forward.rows.whole_reasons import WholeReason
from lagom.inspection.reads import is_plain, is_tensor
from lagom.inspection.structures import unflatten
from lagom.patching.dynamo import num_compilations
from lagom.run_state.loader_pass import BatchShare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from lagom.session.session import Session

_MAX_MISMATCHES = 8
"""A forward runs whole when its mismatches (calls with another branch) exceed its other calls by more than this."""
MAX_BRANCHES = 16
"""Number of new branches in calls of one kind after which such calls always run whole."""
num_nodes_made = torch._C._autograd._get_sequence_nr
"""Returns how many nodes of a graph this thread has made so far."""


class NewBranchError(BranchMismatchError):
    """A forward has made another number of autograd nodes than before with inputs of ``shapes``."""

    def __init__(self, shapes: object, num_nodes: int) -> None:
        super().__init__()
        self.shapes, self.num_nodes = shapes, num_nodes


@dataclass(eq=False)
class SlicedForward:
    """Holds the rank's share of rows (for BatchNorm) and the mode for random draws, while a sliced forward runs."""

    share: BatchShare
    draws: Draws | None
    needs_mode: bool = False
    """Whether only a dispatch mode sees all draws of the forward."""
    was_at_prompt: bool = False
    """Whether a person typed at a debugger's prompt inside the forward: this may have added nodes to the graph."""

    @contextmanager
    def enter(self, session: Session) -> Iterator[None]:
        """Let BatchNorm and random draws see the whole batch; a nested entry changes nothing."""
        before = session.forwards.sliced_forward
        if before is self:
            yield
            return
        session.forwards.sliced_forward = self
        try:
            with self.draws.entered(by_mode=self.needs_mode) if self.draws else nullcontext():
                yield
        finally:
            session.forwards.sliced_forward = before

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Pause ``draws`` for what is not the forward's: a probe of a module inside, or exchanges of losses."""
        if self.draws is None:
            yield
            return
        self.draws.is_paused = True
        try:
            yield
        finally:
            self.draws.is_paused = False


@dataclass(eq=False)
class MicroBatch:
    """Holds the mode for random draws while the forward of a micro-batch runs."""

    draws: Draws
    needs_mode: bool
    """Whether only a dispatch mode sees all draws of the forward."""
    left_alone: Callable[[], AbstractContextManager[None]]
    """Returns a context manager in which called modules are not split."""

    @contextmanager
    def enter(self, session: Session) -> Iterator[None]:
        """Let random draws see the whole batch; a nested entry changes nothing."""
        before = session.forwards.micro_batch
        if before is self:
            yield
            return
        session.forwards.micro_batch = self
        try:
            with self.left_alone(), self.draws.entered(by_mode=self.needs_mode):
                yield
        finally:
            session.forwards.micro_batch = before


class SlicedRuns:
    """Runs a module's forward on this rank's rows, and gathers the outputs of all ranks."""

    def __init__(self, session: Session, gatherer: Gatherer) -> None:
        self._session = session
        self._gatherer = gatherer

    def run(self, candidate: SplitCandidate, finding: SplitFinding) -> Any:
        """Run a forward on this rank's rows; return its outputs for all rows.

        Raises:
            BranchMismatchError: on all ranks, when the forward takes another way than in its probe. torch's generators
                and the buffers are restored. It is a ``NewBranchError`` if the new way should be probed too.
            DivergenceError: on all ranks, when their inputs differ with ``batches="whole"``.
            LagomError: when the outputs are unlike those of the probe.
        """
        session, group = self._session, self._session.group
        assert group is not None
        session.forwards.has_sliced = session.forwards.has_sliced or torch.is_grad_enabled()
        block = row_block(group.rank, group.world_size, candidate.rows)
        exchange = RowExchange(self._gatherer, block, f"the output of {type(candidate.module).__name__}")
        leaves = [slice_rows(leaf, exchange) if is_batch(leaf, candidate.rows) else leaf for leaf in candidate.leaves]
        region = self._region(candidate, finding, block, leaves)
        losses = RankLosses(finding.losses, exchange, region.left_alone, _signed(candidate) if finding.losses else b"")
        if losses.has_reductions and num_compilations():
            finding.sliced = False  # the next call is probed again, without sums: compiled code does not show them
            raise BranchMismatchError
        with (
            _checked_branch(candidate, finding, region.draws) as restore,
            region.enter(session),
            losses.entered() if session.config.batches == "whole" else nullcontext(),
        ):
            before = num_nodes_made()
            outputs, spec = candidate.outputs(leaves, finding.places)
            losses.end()
            shapes, num_nodes = _shapes(candidate), num_nodes_made() - before
            if not region.was_at_prompt and not finding.is_known_branch(shapes, num_nodes):
                raise NewBranchError(shapes, num_nodes)
        if finding.makes_leaves:
            session.tensors.repeated_inputs.update(dict.fromkeys(find_unread(outputs, candidate.inside)))
        if spec != finding.spec:
            raise LagomError(
                f"the forward of {type(candidate.module).__name__} gave outputs of another structure than at its first "
                "call; use batches='split' and evaluation='replicated' for this program"
            )
        is_stale = region.draws is not None and region.draws.is_stale
        try:
            passed = {id(leaf): whole for leaf, whole in zip(leaves, candidate.leaves, strict=True)}
            if finding.input_reads.reads and not _are_signed(outputs, passed, finding, candidate):
                self._compare_reads(candidate, finding, restore, is_stale=is_stale)
            return unflatten(_gather_outputs(outputs, passed, finding, exchange, candidate, is_stale), spec)
        except UnequalInputError:
            if finding.input_reads.reads:
                self._compare_reads(candidate, finding, restore, is_stale=is_stale)
            if session.config.batches == "whole":
                raise
            restore()  # an evaluation called the model with a share of a training batch, which differs between ranks
            finding.reason = WholeReason.OTHER_INPUT.filled()
            return candidate.run(candidate.leaves)

    def _region(
        self, candidate: SplitCandidate, finding: SplitFinding, block: RowBlock, leaves: list[Any]
    ) -> SlicedForward:
        """Return what a forward sees of the whole batch, when it gets ``leaves`` with the rows of ``block``."""
        reads = finding.input_reads
        answers = reads.answers(finding.reads, reads.find(leaves, candidate.inside)) if reads.reads else finding.reads
        watches = bool(finding.axes or finding.reads) or self._session.reads_in_threads
        return SlicedForward(
            BatchShare(block.num_mine, block.num_all, block.even),
            Draws(block, finding.axes, answers, finding.multiples) if watches else None,
            finding.needs_mode,
        )

    def _compare_reads(
        self, candidate: SplitCandidate, finding: SplitFinding, restore: Callable[[], None], *, is_stale: bool
    ) -> None:
        """Find out whether a read of any rank was not as expected; if so, have the forward run whole, and probed again.

        Raises:
            BranchMismatchError: on all ranks, if one was.
        """
        assert self._session.group is not None
        if not any(map(bool, self._session.group.all_gather_bytes(b"1" if is_stale else b""))):
            return
        restore()
        finding.sliced = False
        finding.num_new_branches += 1
        if finding.num_new_branches > MAX_BRANCHES:
            finding.reason = WholeReason.OFTEN_OTHER_BRANCH.filled()
        raise BranchMismatchError


@contextmanager
def _checked_branch(
    candidate: SplitCandidate, finding: SplitFinding, draws: Draws | None
) -> Iterator[Callable[[], None]]:
    """Find out whether a forward takes another way than in its probe; if so, restore torch's generators and buffers.

    Yield a function that restores them.

    Raises:
        BranchMismatchError: when the forward takes another way.
    """
    generators: list[Any] = [torch.default_generator]
    if is_accelerator(candidate.device) and is_initialized(candidate.device):
        generators.append(global_generator(candidate.device))
    states = [generator.get_state() for generator in generators]
    buffers = copy_buffers(candidate.inside) if finding.changes_buffers else []

    def restore() -> None:
        for state, generator in zip(states, generators, strict=True):
            generator.set_state(state)
        restore_buffers(buffers)

    try:
        yield restore
        if draws is not None:
            draws.end()
        elif not all(torch.equal(state, one.get_state()) for state, one in zip(states, generators, strict=True)):
            raise BranchMismatchError
    except Exception as error:
        # Compilers and TorchScript raise errors of their own in place of a BranchMismatchError.
        has_mismatch = draws is not None and draws.has_mismatch and not isinstance(error, LagomError)
        if not isinstance(error, BranchMismatchError) and not has_mismatch:
            raise
        restore()
        if isinstance(error, NewBranchError):
            raise
        finding.num_mismatches += 1
        if finding.num_mismatches > _MAX_MISMATCHES:
            finding.reason = WholeReason.OFTEN_OTHER_BRANCH.filled()
        if isinstance(error, BranchMismatchError):
            raise
        raise BranchMismatchError from error
    finding.num_mismatches = max(0, finding.num_mismatches - 1)


def _signed(candidate: SplitCandidate) -> bytes:
    """Return bytes of the arguments, which must be equal on all ranks."""
    rows = b"".join(sample_bytes(leaf) for leaf in candidate.leaves if is_batch(leaf, candidate.rows))
    values = [leaf for leaf in candidate.leaves if is_plain(leaf)]
    return rows + repr(values).encode() if values else rows


def _shapes(candidate: SplitCandidate) -> object:
    return tuple([leaf.shape if is_tensor(leaf) else None for leaf in candidate.leaves])


def _are_signed(outputs: list[Any], passed: dict[int, Any], finding: SplitFinding, candidate: SplitCandidate) -> bool:
    """Return whether the gather of the outputs compares signatures: on a CPU, if there is anything to gather."""
    gathers = any(
        factor is not None and id(output) not in passed for output, factor in zip(outputs, finding.factors, strict=True)
    )
    return gathers and candidate.device.type == "cpu"


def _gather_outputs(
    outputs: list[Any],
    passed: dict[int, Any],
    finding: SplitFinding,
    exchange: RowExchange,
    candidate: SplitCandidate,
    is_stale: bool,
) -> list[Any]:
    """Return each output with the rows of all ranks.

    Args:
        passed: the leaves of the program's arguments, by the id of the leaf that the module got instead.
        is_stale: whether an answer to a read was not to the question of the forward.

    Raises:
        LagomError: when an output does not have the rows or the memory that it had in the probe.
    """
    by_rows = [
        (i, factor) for i, factor in enumerate(finding.factors) if factor is not None and id(outputs[i]) not in passed
    ]
    for i, factor in by_rows:
        output = outputs[i]
        if not is_tensor(output) or output.dim() == 0 or output.shape[0] != factor * exchange.block.num_mine:
            raise LagomError(
                f"the forward of {type(candidate.module).__name__} gave an output that has not a row for each "
                "sample, unlike at its first call; use batches='split' and evaluation='replicated' for this program"
            )
    # A module may return one tensor twice; the program must get one tensor twice, too.
    places = {id(outputs[i]): i for i, _ in by_rows if finding.bases[i] is None}
    blocks = [outputs[i] for i in places.values()]
    # The rank makes it unequal also if all ranks are stale.
    signed = f"stale {exchange.block.rank}".encode() * is_stale + _signed(candidate)
    wholes = gather_blocks(
        blocks,
        exchange,
        [finding.factors[i] or 0 for i in places.values()],
        signed,
        [finding.orders[i] for i in places.values()],
    )
    gathered = passed | dict(zip(places, wholes, strict=True))
    for i, _ in by_rows:
        output, base = outputs[i], finding.bases[i]
        if base is not None:
            gathered[id(output)] = view_like(output, outputs[base], gathered[id(outputs[base])])
        elif not output.requires_grad:
            gathered[id(output)] = gathered[id(output)].detach()
        gathered[id(output)] = as_kind_of(output, gathered[id(output)])
    results = [gathered.get(id(output), output) for output in outputs]
    turned = {id(one): place.put_back(one) for one, place in zip(results, finding.places, strict=False) if place}
    return [turned.get(id(one), one) for one in results]


# Note [Other ways]
#
# A finding holds for the way that a forward took in its probe: the branches of its code. Calls are distinguished by the
# values that a forward can see (see Note [Surroundings] in surroundings.py). But a forward may also branch on values in
# tensors: a buffer's, or a random number (a layer is skipped in a third of all calls). These values are equal on all
# ranks, and a forward reads them through torch, so they are compared with the probe's values before the forward gets
# them. If they differ, or if random numbers are drawn in a way that the probe has not seen, no output has been
# exchanged yet. So random states and buffers are restored, and all ranks run this call whole.
#
# Some values that a forward can see are not compared: environment variables, an optimizer's learning rate. Numbers in
# globals and objects are compared by their sign only. So the autograd nodes that a call adds to the graph are counted
# too. If their number is none of those known for the same shapes, the forward may have begun to mix rows
# (x - x.mean(0) adds two nodes), and is probed again before outputs are exchanged.
