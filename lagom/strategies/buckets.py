"""``Buckets``: large gradients, each or a few together summed over the ranks while something else goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.strategies.layout import travelling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.aside import Work


class Moving(NamedTuple):
    """A bucket that is under way."""

    work: Work
    flat: torch.Tensor
    gradients: list[torch.Tensor]
    views: list[torch.Tensor] | None
    """Of ``flat``; None where that is the gradient itself."""


def launch(gradients: Sequence[torch.Tensor], all_reduce: Callable[[torch.Tensor], Work], world_size: int) -> Moving:
    """Begin to average ``gradients``, all of one type and device, in place; they are not to be used until landed."""
    first = gradients[0]
    dtype = travelling(first.dtype)
    views = None
    if len(gradients) == 1 and first.is_contiguous() and dtype == first.dtype and _is_sole_owner(first):
        flat = first.view(-1)
    else:
        sizes = [gradient.numel() for gradient in gradients]
        flat = torch.empty(sum(sizes), dtype=dtype, device=first.device)
        views = [part.view(g.shape) for part, g in zip(flat.split(sizes), gradients, strict=True)]
        torch._foreach_copy_(views, list(gradients))
    if flat.element_size() < 4:  # the sum of halves may not fit
        flat.div_(world_size)
    return Moving(all_reduce(flat), flat, list(gradients), views)


def land(moving: Moving, wait: Callable[[Work], None], world_size: int) -> None:
    """Wait until the gradients are averages."""
    wait(moving.work)
    if moving.flat.element_size() >= 4:
        moving.flat.div_(world_size)
    if moving.views is not None:
        torch._foreach_copy_(moving.gradients, moving.views)


def _is_sole_owner(gradient: torch.Tensor) -> bool:
    """Whether no other tensor has the same memory.

    A leaf's gradient may be a view of one that the backward has yet to read, or share its memory with another leaf's.
    """
    storage = gradient.untyped_storage()  # one more that counts
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2
