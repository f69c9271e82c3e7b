"""``MicroBatchRunner``: run a forward as checkpointed micro-batches, one after another. See Note [Micro-batches]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lagom.errors import LagomError
from lagom.random_states import equal_random_states, random_states, set_random_states
from lagom.row_split.draws import Draws
from lagom.row_split.split_candidate import SplitCandidate, SplitFinding, is_batch
from lagom.row_split.whole_batch import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from lagom.session.session import Session

_REMEDY = "drop micro_batches for this program"


class MicroBatchRunner:
    """Runs forwards that are known to compute their rows one by one.

    Args:
        left_alone: a context in which called modules are not split.
    """

    def __init__(self, session: Session, left_alone: Callable[[], AbstractContextManager[None]]) -> None:
        self._session = session
        self._left_alone = left_alone

    def outputs(self, candidate: SplitCandidate, finding: SplitFinding, num: int) -> Any:
        """Return the concatenated outputs of all micro-batches."""
        begun = random_states()
        parts: list[Sequence[Any]] = []
        end: dict[str, Any] = {}
        for block in Block(0, num, candidate.rows).others:
            part = _Part(self, candidate, finding, block, begun)
            leaves = [block.of(leaf) if is_of_batch else leaf for leaf, is_of_batch in _marked(candidate)]
            if torch.is_grad_enabled():
                # Each part restores the random numbers itself, including those of python and numpy.
                outputs = checkpoint(part, *leaves, use_reentrant=False, preserve_rng_state=False)
            else:
                outputs = part(*leaves)
            parts.append(outputs)
            if block.rank and not equal_random_states(end, random_states()):
                raise LagomError(f"the forward of {_name(candidate)} drew random numbers in another way; {_REMEDY}")
            end = end or random_states()
        self._session.num_micro_batches = max(self._session.num_micro_batches, num)
        assert finding.spec is not None
        return tree_unflatten(_together(parts, finding, candidate), finding.spec)

    def run(self, part: _Part, leaves: list[Any]) -> list[Any]:
        """Run one micro-batch with the generators' first states; modules inside it are not split."""
        candidate, finding = part.candidate, part.finding
        before = random_states() if part.ran else None
        set_random_states(part.begun)
        try:
            if self._session.weights is not None:
                self._session.weights.resident.begin()
            with self._left_alone(), Draws(part.block, finding.axes, remedy=_REMEDY):
                outputs, spec = tree_flatten(candidate.run(leaves))
        finally:
            part.ran = True
            if before is not None:
                set_random_states(before)
        if spec != finding.spec:
            raise LagomError(
                f"the forward of {_name(candidate)} gave outputs of another structure than at its first call; {_REMEDY}"
            )
        return outputs


class _Part:
    """The function of a checkpoint, which calls it again in the backward."""

    def __init__(
        self,
        owner: MicroBatchRunner,
        candidate: SplitCandidate,
        finding: SplitFinding,
        block: Block,
        begun: dict[str, Any],
    ) -> None:
        self.candidate = candidate
        self.finding = finding
        self.block = block
        self.begun = begun
        """States of the generators at the beginning of the whole forward."""
        self.ran = False
        self._owner = owner

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        return tuple(self._owner.run(self, list(leaves)))


def _marked(candidate: SplitCandidate) -> list[tuple[Any, bool]]:
    return [(leaf, is_batch(leaf, candidate.rows)) for leaf in candidate.leaves]


def _together(parts: Sequence[Sequence[Any]], finding: SplitFinding, candidate: SplitCandidate) -> list[Any]:
    found = []
    for outputs, factor in zip(zip(*parts, strict=True), finding.factors, strict=True):
        if factor is None:
            first, *others = outputs
            if not isinstance(first, torch.Tensor) and any(one != first and one == one for one in others):
                raise LagomError(
                    f"the forward of {_name(candidate)} gave {first!r} for a part of its batch and {others[-1]!r} for "
                    f"another, unlike at its first call; {_REMEDY}"
                )
            found.append(first)
            continue
        rows = factor * candidate.rows
        if not all(isinstance(one, torch.Tensor) and one.dim() for one in outputs):
            rows = -1
        whole: Tensor | None = torch.cat(outputs) if rows >= 0 else None
        if whole is None or whole.shape[0] != rows:
            raise LagomError(
                f"the forward of {_name(candidate)} gave an output that has not a row for each sample, unlike at its "
                f"first call; {_REMEDY}"
            )
        found.append(whole)
    return found


def _name(candidate: SplitCandidate) -> str:
    return type(candidate.module).__name__
