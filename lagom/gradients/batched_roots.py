"""Take the gradients of a batched call (``is_grads_batched``, ``torch.func.vmap``) one after another.

An exchange between ranks cannot be part of a batched call.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

_functorch = torch._C._functorch


def take_one_by_one(
    roots: Sequence[Tensor], take: Callable[[tuple[Tensor, ...], bool], Sequence[Tensor | None]]
) -> tuple[Tensor | None, ...]:
    """Return the gradients for all elements of the batch in ``roots``, with the same batch dimension.

    Args:
        roots: gradients of the outputs, at least one of them batched.
        take: returns the gradients for one element of the batch; its second argument tells whether it is the last one.
    """
    legacy = _functorch.is_legacy_batchedtensor(roots[0])
    level = _legacy_level() if legacy else _functorch.current_level()
    plain = [_remove_batch(root, level, legacy) for root in roots]
    num = next(len(one) for one, is_batched in plain if is_batched)
    with _left_vmap() if legacy else temporarily_pop_interpreter_stack():
        found = [
            take(tuple(one[i] if is_batched else one for one, is_batched in plain), i == num - 1) for i in range(num)
        ]
        stacked = [None if column[0] is None else torch.stack(column) for column in zip(*found, strict=True)]
    add: Any = torch._add_batch_dim if legacy else _functorch._add_batch_dim
    return tuple(None if one is None else add(one, 0, level) for one in stacked)


def _remove_batch(root: Tensor, level: int, legacy: bool) -> tuple[Tensor, bool]:
    """Return a batched root as a plain tensor, the batch first, and True; any other root unchanged, and False."""
    if legacy:
        return torch._remove_batch_dim(root, level, 1, 0), True
    if not _functorch.is_batchedtensor(root) or _functorch.maybe_get_level(root) != level:
        return root, False
    return _functorch.get_unwrapped(root).movedim(_functorch.maybe_get_bdim(root), 0), True


def _legacy_level() -> int:
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


@contextmanager
def _left_vmap() -> Iterator[None]:
    torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        torch._C._vmapmode_increment_nesting()
