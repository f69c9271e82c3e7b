"""``BackwardCache``: recognizes a backward that repeats an earlier one, so that little work is left around autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from lagom.exchange.agreement_exchange import is_plain_cpu_tensor
from lagom.gradients.overlap import MIN_BYTES
from lagom.run_state.leaf_hooks import has_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.gradients.reduction.buckets import Layout
    from lagom.run_state.leaves import Leaves

_MAX_KNOWN = 64


class CachedBackward(NamedTuple):
    """Collects the gradients of a backward that repeats an earlier one, in the order of the earlier one's layout.

    See Note [Cached backwards].
    """

    kinds: list[tuple[torch.dtype, torch.Size]]
    """Types and shapes of the gradients."""
    layout: Layout

    def collect_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the gradients of ``leaves`` if all are plain and of the types and shapes in ``kinds``; else None."""
        found = []
        for leaf, (dtype, shape) in zip(leaves, self.kinds):  # noqa: B905
            one = leaf.grad
            if one is None or one.dtype is not dtype or one.shape != shape or one.requires_grad:
                return None
            if not is_plain_cpu_tensor(one):
                return None
            found.append(one)
        return found


class BackwardCache:
    """Remembers earlier backwards by the numbers of their leaves, in order; other ranks may remember others."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._known: dict[tuple[int | None, ...], CachedBackward] = {}

    def find(self, leaves: Sequence[torch.Tensor]) -> CachedBackward | None:
        """Return the cached backward that reached the same ``leaves`` in the same order; None if there is none.

        None also if a leaf has a gradient or a hook now.
        """
        cached = self._known.get(tuple(map(self._leaves.known, leaves)))
        if cached is None:
            return None
        for leaf in leaves:
            if leaf.grad is not None or has_hooks(leaf):
                return None
        return cached

    def add(self, leaves: Sequence[torch.Tensor], layout: Layout) -> None:
        """Remember a backward on which all ranks have agreed; do nothing if it is not small (see ``is_small``).

        Args:
            leaves: the leaves that it reached. They had no gradients before, and ``can_repeat`` is true for them.
            layout: the layout of their gradients.
        """
        if not is_small(layout) or len(layout.numbers) != len(leaves):
            return
        kinds = [(leaf.grad.dtype, leaf.grad.shape) for leaf in leaves if leaf.grad is not None]
        if len(self._known) == _MAX_KNOWN:
            self._known.clear()
        self._known[tuple(map(self._leaves.known, leaves))] = CachedBackward(kinds, layout)


def can_repeat(leaves: Sequence[torch.Tensor]) -> bool:
    """Return whether a cached backward can serve ``leaves``: parameters with plain, real gradients on the CPU."""
    found = [leaf.grad for leaf in leaves if isinstance(leaf, nn.Parameter)]
    plain = [one for one in found if one is not None and one.dtype.is_floating_point and is_plain_cpu_tensor(one)]
    return len(plain) == len(leaves)


def is_small(layout: Layout) -> bool:
    """Return whether gradients of ``layout`` are dense, and too small on the CPU to be sent while a backward runs."""
    return not layout.sparse and layout.on_cpu < MIN_BYTES


# Note [Cached backwards]
#
# Nearly all backwards of a program reach the same parameters as an earlier backward, these have no gradients and no
# hooks before, and nothing is being accumulated. If the gradients are also small and on the CPU, agreeing and averaging
# is enough: the leaves need no `BackwardGradients`, and `GradientAverager` need not look them up. Other ranks see no
# difference: there is the same single exchange with the same signature (or none: see Note [Replicas] in replicas.py),
# also for the comparisons of Note [Divergence] in divergence.py. If anything has changed, before the backward or after,
# or if the ranks do not agree, the backward is finished in the ordinary way.
