"""``Steady``: recognizes a backward that repeats an earlier one, so that little work is left around autograd."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from lagom.collectives.agreement_exchange import lies_plainly
from lagom.gradients.overlap import WORTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.gradients.reduction.layout import Layout

_MAX_KNOWN = 64


class Course(NamedTuple):
    """The leaves of a backward, and the layout of their gradients; see Note [Steady backwards]."""

    leaves: list[weakref.ref[torch.Tensor]]
    kinds: list[tuple[torch.dtype, torch.Size]]
    """Types and shapes of the gradients."""
    layout: Layout

    def begins(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether ``leaves`` are the course's leaves, without gradients and without hooks.

        Args:
            leaves: as many leaves as the course has.
        """
        for leaf, ref in zip(leaves, self.leaves):  # noqa: B905  (strict takes longer)
            if ref() is not leaf or leaf.grad is not None:
                return False
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                return False
        return True

    def gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the gradients of ``leaves`` if their types and shapes are the course's and they are contiguous."""
        found = []
        for leaf, (dtype, shape) in zip(leaves, self.kinds):  # noqa: B905
            one = leaf.grad
            if one is None or one.dtype is not dtype or one.shape != shape or one.requires_grad:
                return None
            if not lies_plainly(one):
                return None
            found.append(one)
        return found


class Steady:
    """Remembers the courses of earlier backwards."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Course] = {}

    def begun(self, leaves: Sequence[torch.Tensor]) -> Course | None:
        """Return the known course of a backward that is about to reach ``leaves``; None if there is none."""
        course = self._known.get(tuple(map(id, leaves)))
        return course if course is not None and course.begins(leaves) else None

    def note(self, leaves: Sequence[torch.Tensor], layout: Layout) -> None:
        """Remember a backward on which all ranks have agreed, if later ones can repeat it.

        Args:
            leaves: the leaves that it reached, which had no gradients before.
            layout: the layout of their gradients.
        """
        if layout.sparse or layout.on_cpu >= WORTH or len(layout.numbers) != len(leaves):
            return
        found = [leaf.grad for leaf in leaves if isinstance(leaf, nn.Parameter)]
        kinds = [(one.dtype, one.shape) for one in found if one is not None and lies_plainly(one)]
        if len(kinds) < len(leaves) or not all(dtype.is_floating_point for dtype, _ in kinds):
            return
        if len(self._known) == _MAX_KNOWN:
            self._known.clear()
        self._known[tuple(map(id, leaves))] = Course([weakref.ref(leaf) for leaf in leaves], kinds, layout)


# Note [Steady backwards]
#
# Nearly all backwards of a program reach the same parameters as an earlier one, which have no gradients and no hooks
# before, and they are not part of an accumulation. For these, agreeing and averaging is enough: the leaves need no
# `BackwardGradients`, and `Replicate` need not look them up. Other ranks see no difference: there is the same single
# exchange with the same signature, also for the comparisons of Note [Divergence]. If anything has changed, before the
# backward or after, or if the ranks do not agree, the backward is finished in the ordinary way.
