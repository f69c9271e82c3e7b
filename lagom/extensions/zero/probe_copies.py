"""Small copies of parameters for the optimizer probe: their groups, shapes, values, gradients and parts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Part = Callable[[torch.Tensor, int], list[torch.Tensor]]
    """Takes a small parameter and its index; returns views of the part of it that is to be stepped."""

CAP = 256
"""Longest side of a small copy: some methods treat a matrix differently from 128 on, or from 4096 elements."""
_MOST = 1 << 17
"""Most elements of a small copy."""


def _half(small: torch.Tensor, *, second: bool) -> list[torch.Tensor]:
    """Return a list with a flat view of one half of the memory; an empty list if that half is empty."""
    line = small.detach().view(-1)
    middle = len(line) // 2
    half = line[middle:] if second else line[:middle]
    return [half.requires_grad_()] if len(half) else []


HALVES: Sequence[Part] = (
    lambda small, _: _half(small, second=False),
    lambda small, _: _half(small, second=True),
)
EVERY_OTHER: Sequence[Part] = (lambda small, i: [] if i % 2 else [small], lambda small, i: [small] if i % 2 else [])


def typical_parameters(params: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the smallest and the largest parameter of each number of dimensions."""
    by_dim: dict[int, list[torch.Tensor]] = {}
    for p in params:
        if not is_lazy(p) and p.numel():
            by_dim.setdefault(p.dim(), []).append(p)
    for same in by_dim.values():
        smallest, largest = min(same, key=torch.Tensor.numel), max(same, key=torch.Tensor.numel)
        yield smallest
        if largest is not smallest:
            yield largest


def capped_shape(shape: torch.Size, cap: int) -> list[int]:
    """Return the shape of a small copy: each side is at most ``cap``, and there are at most ``_MOST`` elements."""
    sides = [min(side, cap) for side in shape]
    while sides and torch.Size(sides).numel() > _MOST:
        sides[sides.index(max(sides))] //= 2
    return sides


def initial_values(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the initial values of a small parameter."""
    found = torch.empty(like.shape, dtype=dtype, device=like.device)
    fill_gradient(found, 1)
    return found


@torch.no_grad()
def fill_gradient(tensor: torch.Tensor, number: int) -> None:
    """Fill a tensor with values that look random and grow towards the end, so that its halves have different norms."""
    places = torch.arange(1, tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    values = torch.sin(places * (1.3 + 0.7 * number)) * (0.1 + places / tensor.numel())
    tensor.copy_(values.view(tensor.shape))


def copy_group(group: dict[str, Any], smalls: list[torch.Tensor], memo: dict[int, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings with the parameters ``smalls``, and a learning rate of 0.01."""
    found = {key: copy.deepcopy(value, memo) for key, value in group.items() if key not in ("params", "lr")}
    rate = group.get("lr")
    if "lr" in group:  # a warm-up begins with a learning rate of 0, with which no parameter would change
        found["lr"] = torch.full_like(rate, 1e-2) if isinstance(rate, torch.Tensor) else 1e-2
    return {"params": list(smalls), **found}


def set_gradients(
    clone: Any, groups: list[list[torch.Tensor]], part: Part, number: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Set the gradients of the stepped pieces for step ``number``; return each piece with a copy of its gradient."""
    given = []
    for group, smalls in zip(clone.param_groups, groups, strict=True):
        pieces = iter(group["params"])
        for i, small in enumerate(smalls):
            gradient = torch.empty_like(small, requires_grad=False)
            fill_gradient(gradient, number + i + 2)
            for one in part(gradient, i):
                piece = next(pieces)
                piece.grad = one.detach().clone()
                given.append((piece, one.detach()))
    return given
