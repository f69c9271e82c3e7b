"""Outputs of a module that share memory: a program that changes one in place finds the change in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lagom.errors import LagomError
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.inspection.reads import is_tensor
from lagom.run_state.memory_layout import is_dense, memory_order, storage_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_bases(outputs: list[Any], factors: list[int | None], leaves: list[Any]) -> list[int | None]:
    """Return for each output the index of the output that it is a view of; None if it has its own memory.

    None also for an output without rows, and for one that is a leaf of the arguments itself.

    Args:
        factors: for each output its rows per row of the batch; None without rows.
        leaves: the leaves of the arguments.

    Raises:
        NotByRowsError: if outputs share memory in another way, or share it with the input.
    """
    # A module may return one tensor twice, or its input: the program must get the same tensor object again.
    made = {id(one): i for i, (one, factor) in enumerate(zip(outputs, factors, strict=True)) if factor is not None}
    for leaf in leaves:
        made.pop(id(leaf), None)
    places = list(made.values())
    base_tensors = _find_bases([outputs[i] for i in places])
    given = [leaf for leaf in leaves if is_tensor(leaf)]
    if base_tensors is None or any(_shares_memory(outputs[i], leaf) for i in places for leaf in given):
        raise NotByRowsError(WholeReason.SHARED_MEMORY)
    bases: list[int | None] = [None] * len(outputs)
    for i, base in zip(places, base_tensors, strict=True):
        bases[i] = None if base is None else places[base]
    return bases


def view_like(output: Tensor, base: Tensor, whole: Tensor) -> Tensor:
    """Return the view of ``whole`` that matches the view ``output`` of ``base``, this rank's block of ``whole``.

    Raises:
        LagomError: if ``output`` is no view of ``base``.
    """
    if storage_of(output)._cdata != storage_of(base)._cdata or output.requires_grad > base.requires_grad:
        raise LagomError(
            "a forward gave an output that is no view of another one, unlike at its first call; use batches='split' "
            "and evaluation='replicated' for this program"
        )
    rows = output.shape[0] * whole.shape[0] // base.shape[0]
    # The stride of a single row may be any number.
    stride = whole.stride(0) if output.stride(0) == base.stride(0) else output.stride(0)
    offset = whole.storage_offset() + output.storage_offset() - base.storage_offset()
    view = whole if output.requires_grad else whole.detach()
    return view.as_strided((rows, *output.shape[1:]), (stride, *output.stride()[1:]), offset)


def as_kind_of(one: Tensor, whole: Tensor) -> Tensor:
    """Return ``whole`` in the class of ``one``, which may be the program's, with the attributes of ``one``."""
    if type(one) is Tensor or type(whole) is type(one):
        return whole
    found: Tensor = whole.as_subclass(type(one))
    found.__dict__.update(one.__dict__)
    return found


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two strided tensors have any memory in common."""
    if storage_of(one)._cdata != storage_of(other)._cdata:
        return False
    return np.shares_memory(np.asarray(_Places(one)), np.asarray(_Places(other)))


def _find_bases(tensors: Sequence[Tensor]) -> list[int | None] | None:
    """Return for each strided tensor the index of the tensor that it is a view of; None if it has its own memory.

    Each base has its elements side by side, row by row. Return None for all if tensors share memory in another way.
    """
    bases: list[int | None] = [None] * len(tensors)
    roots: list[int] = []
    for i in sorted(range(len(tensors)), key=lambda i: _rank(tensors[i])):
        together = [root for root in roots if _shares_memory(tensors[i], tensors[root])]
        if not together:
            roots.append(i)
        elif len(together) > 1 or not _is_view_of(tensors[i], tensors[together[0]]):
            return None
        else:
            bases[i] = together[0]
    return bases


def _rank(tensor: Tensor) -> tuple[bool, int, bool]:
    """Return a sort key that puts possible bases before their views."""
    return not is_dense(tensor), -tensor.nbytes, not tensor.requires_grad


def _is_view_of(one: Tensor, base: Tensor) -> bool:
    """Return whether ``one`` lies within ``base``, whose elements must be side by side in memory, row by row."""
    if one.dtype != base.dtype or not is_dense(base) or (memory_order(base) or (0,))[0]:
        return False
    if one.is_conj() != base.is_conj() or one.is_neg() != base.is_neg() or (one.requires_grad > base.requires_grad):
        return False
    last = one.storage_offset() + sum((n - 1) * stride for n, stride in zip(one.shape, one.stride(), strict=True))
    return base.storage_offset() <= one.storage_offset() and last < base.storage_offset() + base.numel()


class _Places:
    """Describes the addresses of a tensor's elements to numpy, which does not read the elements."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
        }
