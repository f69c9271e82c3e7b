"""``Steady``: a backward that reaches what an earlier one did, with as little as possible around it."""

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
    """How a backward goes; see Note [Steady backwards]."""

    leaves: list[weakref.ref[torch.Tensor]]
    kinds: list[tuple[torch.dtype, torch.Size]]
    """Of their gradients."""
    layout: Layout

    def begins(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether ``leaves``, as many, are these, have no gradients, and nobody waits for what they get."""
        for leaf, ref in zip(leaves, self.leaves):  # noqa: B905  (strict takes longer)
            if ref() is not leaf or leaf.grad is not None:
                return False
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                return False
        return True

    def gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Those that ``leaves`` have got, if they are of the same kinds and lie plainly in memory."""
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
    """The courses that backwards have taken."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Course] = {}

    def begun(self, leaves: Sequence[torch.Tensor]) -> Course | None:
        """The course of a backward that is about to reach ``leaves``, where that is known."""
        course = self._known.get(tuple(map(id, leaves)))
        return course if course is not None and course.begins(leaves) else None

    def note(self, leaves: Sequence[torch.Tensor], layout: Layout) -> None:
        """A backward reached ``leaves``, which had no gradients, as all ranks have agreed; ``layout`` is of these."""
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
# Nearly all backwards of a program reach the same parameters as one before, find no gradients there and no hooks, and
# are not part of an accumulation. What they need then is to be agreed on and averaged, and nothing else of what
# `Pending` keeps and `Replicate` finds out. To the other ranks they are like any other: the same one exchange, with the
# same signature, of which what must be compared (see Note [Divergence]) is a part. Whatever is not as it was, before
# the backward or after, goes the long way; so does what the ranks do not agree on.
