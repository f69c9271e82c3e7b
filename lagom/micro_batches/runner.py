"""``MicroBatchRunner``: run a forward as checkpointed micro-batches, one after another.

See Note [Micro-batches] in split_forward.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lagom.errors import LagomError
from lagom.random_states import equal_random_states, random_states, set_random_states
from lagom.row_split.draws import Draws
from lagom.row_split.recorder import BatchStatistics, NotByRowsError
from lagom.row_split.restore import restored_state
from lagom.row_split.sliced_forward import MicroBatch
from lagom.row_split.split_candidate import SplitCandidate, SplitFinding, is_batch, silent
from lagom.row_split.whole_batch import RowBlock
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from lagom.session.session import Session

_REMEDY = "drop micro_batches for this program"


class MicroBatchRunner:
    """Runs forwards that are known to compute their rows one by one, and tries how many parts fit into memory.

    Args:
        left_alone: returns a context manager in which called modules are not split.
    """

    def __init__(self, session: Session, left_alone: Callable[[], AbstractContextManager[None]]) -> None:
        self._session = session
        self._left_alone = left_alone

    def outputs(self, candidate: SplitCandidate, finding: SplitFinding, num: int) -> Any:
        """Return the concatenated outputs of all micro-batches; of outputs without rows, the first.

        Raises:
            OtherWayError: when the forward takes another way than in its probe.
            LagomError: when a micro-batch gives other outputs, or draws other amounts of random numbers.
        """
        begun = random_states()
        parts: list[Sequence[Any]] = []
        end: dict[str, Any] = {}
        for block in RowBlock(0, num, candidate.rows).all_blocks:
            run = self._part(candidate, finding, block, begun)
            leaves = [block.of(leaf) if is_batch(leaf, candidate.rows) else leaf for leaf in candidate.leaves]
            if torch.is_grad_enabled():
                # Each part restores the random numbers itself, including those of python and numpy.
                outputs = checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False)
            else:
                outputs = run(*leaves)
            parts.append(outputs)
            if block.rank and not equal_random_states(end, random_states()):
                raise _changed(candidate, "drew other amounts of random numbers for a part of its batch")
            end = end or random_states()
        self._session.num_micro_batches = max(self._session.num_micro_batches, num)
        assert finding.spec is not None
        return tree_unflatten(_together(parts, finding, candidate), finding.spec)

    def _part(
        self, candidate: SplitCandidate, finding: SplitFinding, block: RowBlock, begun: dict[str, Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """Return the function for torch's checkpoint, which calls it in the forward and again in the backward.

        Args:
            begun: states of the generators at the beginning of the whole forward.
        """
        has_run = False

        def run(*leaves: Any) -> tuple[Any, ...]:
            nonlocal has_run
            before = random_states() if has_run else None
            set_random_states(begun)
            try:
                if self._session.weights is not None:
                    self._session.weights.resident.begin()
                reads = None if has_run else finding.reads
                draws = Draws(block, finding.axes, reads, finding.multiples, _REMEDY)
                with MicroBatch(draws, finding.needs_mode, self._left_alone).enter(self._session):
                    outputs, spec = tree_flatten(candidate.run(list(leaves)))
                draws.end()
            finally:
                has_run = True
                if before is not None:
                    set_random_states(before)
            if finding.spec not in (None, spec):
                raise _changed(candidate, "gave outputs of another structure")
            return tuple(outputs)

        return run

    def find_fitting(self, candidate: SplitCandidate, finding: SplitFinding, num: int) -> int | None:
        """Double ``num`` until one micro-batch fits; return twice that number, or None if no number fits.

        The result is twice the number that fits, since memory is fragmented and batches differ in size. It is at most
        the number of rows.

        Raises:
            NotByRowsError: when the forward or backward of a part fails for another reason than memory.
        """
        while not self._fits(candidate, finding, num):
            if num == candidate.rows:
                return None
            num = min(2 * num, candidate.rows)
        return min(2 * num, candidate.rows)

    def _fits(self, candidate: SplitCandidate, finding: SplitFinding, num: int) -> bool:
        """Return whether there is memory for the forward and backward of one of ``num`` micro-batches.

        Memory for the outputs of all micro-batches and their gradients is allocated during the trial. The trial itself
        allocates the gradients of parameters.

        Raises:
            NotByRowsError: when the trial fails for another reason than memory.
        """
        block = RowBlock(0, num, candidate.rows)
        session = self._session
        kept = restored_state(candidate.module, candidate.inside, opens=False)
        try:
            with kept, session.probing(), session.statistics(BatchStatistics()), silent():
                outputs = self._part(candidate, finding, block, random_states())(*candidate.cut_leaves(block))
                tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
                size = 2 * num * sum(one.nbytes for one in tensors)
                room = torch.empty(size, dtype=torch.uint8, device=candidate.device)
                roots = [one for one in tensors if one.requires_grad]
                wanted = [p for p in candidate.module.parameters() if p.requires_grad]
                if roots and wanted:
                    session.depth += 1  # marks the backward as the rank's own
                    try:
                        torch.autograd.grad(roots, wanted, [*map(torch.zeros_like, roots)], allow_unused=True)
                    finally:
                        session.depth -= 1
                del room
            return True
        except Exception as error:
            if wanted_bytes(error) is None:
                text = f"fails on a part of its batch ({type(error).__name__}: {str(error)[:200]})"
                raise NotByRowsError(text) from error
            return False


def _together(parts: Sequence[Sequence[Any]], finding: SplitFinding, candidate: SplitCandidate) -> list[Any]:
    found = []
    for outputs, factor in zip(zip(*parts, strict=True), finding.factors, strict=True):
        if factor is None:
            first, *others = outputs
            if not isinstance(first, torch.Tensor) and any(one != first and one == one for one in others):
                raise _changed(candidate, f"gave {first!r} for a part of its batch and {others[-1]!r} for another")
            found.append(first)
            continue
        if not all(isinstance(one, torch.Tensor) and one.dim() for one in outputs):
            raise _changed(candidate, "gave an output without rows")
        whole = torch.cat(outputs)
        if whole.shape[0] != factor * candidate.rows:
            raise _changed(candidate, "gave an output that has not a row for each sample")
        found.append(whole)
    return found


def _changed(candidate: SplitCandidate, what: str) -> LagomError:
    return LagomError(f"the forward of {type(candidate.module).__name__} {what}, unlike at its first call; {_REMEDY}")
