"""``BackwardCache``: recognizes a backward that repeats an earlier one, so that little work is left around autograd."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from lagom.collectives.agreement_exchange import lies_plainly
from lagom.gradients.overlap import MIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.gradients.reduction.layout import Layout

_MAX_KNOWN = 64


class CachedBackward(NamedTuple):
    """The leaves of a backward, and the layout of their gradients; see Note [Cached backwards]."""

    leaves: list[weakref.ref[torch.Tensor]]
    kinds: list[tuple[torch.dtype, torch.Size]]
    """Types and shapes of the gradients."""
    layout: Layout

    def matches(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether ``leaves`` are the cached's leaves, without gradients and without hooks.

        Args:
            leaves: as many leaves as the cached has.
        """
        for leaf, ref in zip(leaves, self.leaves):  # noqa: B905  (strict takes longer)
            if ref() is not leaf or leaf.grad is not None:
                return False
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                return False
        return True

    def collect_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the gradients of ``leaves`` if their types and shapes are the cached's and they are contiguous."""
        found = []
        for leaf, (dtype, shape) in zip(leaves, self.kinds):  # noqa: B905
            one = leaf.grad
            if one is None or one.dtype is not dtype or one.shape != shape or one.requires_grad:
                return None
            if not lies_plainly(one):
                return None
            found.append(one)
        return found


class BackwardCache:
    """Remembers the courses of earlier backwards."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], CachedBackward] = {}

    def find(self, leaves: Sequence[torch.Tensor]) -> CachedBackward | None:
        """Return the known cached of a backward that is about to reach ``leaves``; None if there is none."""
        cached = self._known.get(tuple(map(id, leaves)))
        return cached if cached is not None and cached.matches(leaves) else None

    def add(self, leaves: Sequence[torch.Tensor], layout: Layout) -> None:
        """Remember a backward on which all ranks have agreed, if later ones can repeat it.

        Args:
            leaves: the leaves that it reached, which had no gradients before.
            layout: the layout of their gradients.
        """
        if layout.sparse or layout.on_cpu >= MIN_BYTES or len(layout.numbers) != len(leaves):
            return
        found = [leaf.grad for leaf in leaves if isinstance(leaf, nn.Parameter)]
        kinds = [(one.dtype, one.shape) for one in found if one is not None and lies_plainly(one)]
        if len(kinds) < len(leaves) or not all(dtype.is_floating_point for dtype, _ in kinds):
            return
        if len(self._known) == _MAX_KNOWN:
            self._known.clear()
        self._known[tuple(map(id, leaves))] = CachedBackward([weakref.ref(leaf) for leaf in leaves], kinds, layout)


# Note [Cached backwards]
#
# Nearly all backwards of a program reach the same parameters as an earlier one, which have no gradients and no hooks
# before, and they are not part of an accumulation. For these, agreeing and averaging is enough: the leaves need no
# `BackwardGradients`, and `GradientAverager` need not look them up. Other ranks see no difference: there is the same
# single exchange with the same signature, also for the comparisons of Note [Divergence]. If anything has changed,
# before the backward or after, or if the ranks do not agree, the backward is finished in the ordinary way.
