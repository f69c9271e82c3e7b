"""``MicroBatchRunner``: run a forward as checkpointed micro-batches, one after another.

See Note [Micro-batches] in split_forward.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from lagom.errors import LagomError
from lagom.forward.rows.backward_probe import find_unread
from lagom.forward.rows.draws import Draws
from lagom.forward.rows.sliced_forward import MicroBatch
from lagom.forward.rows.split_candidate import SplitCandidate, SplitFinding, is_batch
from lagom.forward.rows.whole_batch import RowBlock
from lagom.inspection.reads import is_tensor
from lagom.inspection.structures import flatten, unflatten
from lagom.random_states import equal_random_states, random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from lagom.session.session import Session

_REMEDY = "drop micro_batches for this program"


class MicroBatchRunner:
    """Runs forwards that are known to compute their rows one by one.

    Args:
        left_alone: returns a context manager in which called modules are not split.
    """

    def __init__(self, session: Session, left_alone: Callable[[], AbstractContextManager[None]]) -> None:
        self._session = session
        self._left_alone = left_alone

    def outputs(self, candidate: SplitCandidate, finding: SplitFinding, num: int) -> Any:
        """Return the concatenated outputs of all micro-batches; of outputs without rows, the first.

        Raises:
            BranchMismatchError: when the forward takes another way than in its probe.
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
                self._session.tensors.repeated_inputs.update(dict.fromkeys(find_unread(outputs, candidate.inside)))
            else:
                outputs = run(*leaves)
            parts.append(outputs)
            if block.rank and not equal_random_states(end, random_states()):
                raise _changed(candidate, "drew other amounts of random numbers for a part of its batch")
            end = end or random_states()
        self._session.forwards.num_micro_batches = max(self._session.forwards.num_micro_batches, num)
        assert finding.spec is not None
        return unflatten(_together(parts, finding, candidate), finding.spec)

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
                if (call := self._session.events.micro_batch_begun.call) is not None:
                    call()
                reads = None if has_run else finding.reads
                draws = Draws(block, finding.axes, reads, finding.multiples, _REMEDY)
                with MicroBatch(draws, finding.needs_mode, self._left_alone).enter(self._session):
                    outputs, spec = flatten(candidate.run(list(leaves)))
                draws.end()
            finally:
                has_run = True
                if before is not None:
                    set_random_states(before)
            if finding.spec not in (None, spec):
                raise _changed(candidate, "gave outputs of another structure")
            return tuple(outputs)

        return run


def _together(parts: Sequence[Sequence[Any]], finding: SplitFinding, candidate: SplitCandidate) -> list[Any]:
    joined = []
    for outputs, factor in zip(zip(*parts, strict=True), finding.factors, strict=True):
        if factor is None:
            first, *others = outputs
            if not is_tensor(first) and any(one != first and one == one for one in others):
                raise _changed(candidate, f"gave {first!r} for a part of its batch and {others[-1]!r} for another")
            joined.append(first)
            continue
        if not all(is_tensor(one) and one.dim() for one in outputs):
            raise _changed(candidate, "gave an output without rows")
        whole = torch.cat(outputs)
        if whole.shape[0] != factor * candidate.rows:
            raise _changed(candidate, "gave an output that has not a row for each sample")
        joined.append(whole)
    return joined


def _changed(candidate: SplitCandidate, what: str) -> LagomError:
    return LagomError(f"the forward of {type(candidate.module).__name__} {what}, unlike at its first call; {_REMEDY}")
