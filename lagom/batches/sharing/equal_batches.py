"""``BatchComparison``: compare two batches bit for bit; only objects that pickle copies exactly count as equal."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = frozenset((bool, int, str, bytes, type(None), torch.Size, torch.dtype, torch.device))
_HEAP = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the flag of classes defined in Python, and of some defined in C."""
_OF_C = (types.MemberDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType)
_BASES = (object, dict, OrderedDict, list, tuple)
"""Built-in classes whose objects are compared; objects of Python classes derived from them are compared too."""


class BatchComparison:
    """Compares two batches: their types, their bits, and which of their parts share memory."""

    def __init__(self) -> None:
        self._pairs: dict[int, object] = {}
        self._back: dict[int, object] = {}
        self.addresses: list[int] = []
        """Addresses of the memory of the tensors in ``mine``."""

    def match(self, mine: Any, other: Any) -> bool:
        """Return whether ``mine`` and ``other`` are equal; False for objects whose state cannot be seen."""
        kind = type(mine)
        if kind is not type(other):
            return False
        if mine is other:
            return True
        if kind in _PLAIN:
            return bool(mine == other)
        if kind in (float, complex):
            return repr(mine) == repr(other)
        if id(mine) in self._pairs or id(other) in self._back:
            return self._pairs.get(id(mine)) is other and self._back.get(id(other)) is mine
        self._pairs[id(mine)], self._back[id(other)] = other, mine
        if kind is Tensor:
            return self._match_tensors(mine, other)
        if kind is np.ndarray or issubclass(kind, np.generic):
            return self._match_arrays(np.asarray(mine), np.asarray(other))
        return self._match_objects(kind, mine, other)

    def _match_objects(self, kind: type, mine: Any, other: Any) -> bool:
        if issubclass(kind, (Tensor, np.ndarray)) or not all(
            one in _BASES or _is_of_python(one) for one in kind.__mro__
        ):
            return False
        if any(vars(one).get("__slots__") for one in kind.__mro__ if one not in _BASES):
            return False
        if not (hasattr(mine, "__dict__") or issubclass(kind, _BASES[1:])):
            return False
        if issubclass(kind, dict) and not self._match_items(_flat(mine), _flat(other)):
            return False
        if issubclass(kind, (list, tuple)) and not self._match_items(list(_raw(mine)), list(_raw(other))):
            return False
        return self._match_items(_flat(getattr(mine, "__dict__", {})), _flat(getattr(other, "__dict__", {})))

    def _match_items(self, mine: list[Any], other: list[Any]) -> bool:
        return len(mine) == len(other) and all(map(self.match, mine, other))

    def _match_tensors(self, mine: Tensor, other: Tensor) -> bool:
        found = _describe(mine)
        return bool(found) and found == _describe(other) and self._match_storages(mine, other)

    def _match_arrays(self, mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
        if mine.dtype.hasobject or not have_equal_elements(mine, other):
            return False
        return mine.flags.owndata == other.flags.owndata

    def _match_storages(self, mine: Tensor, other: Tensor) -> bool:
        storages = mine.untyped_storage(), other.untyped_storage()
        key, key_other = (int(storage._cdata) for storage in storages)
        if key in self._pairs or key_other in self._back:
            return self._pairs.get(key) == key_other and self._back.get(key_other) == key
        self._pairs[key], self._back[key_other] = key_other, key
        self.addresses.append(storages[0].data_ptr())
        # A tensor that is a small part of its storage travels with the whole storage, which takes too long.
        if storages[0].nbytes() > max(1 << 16, 4 * mine.numel() * mine.element_size()):
            return False
        first, second = (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage) for storage in storages)
        return torch.equal(first, second)


def have_equal_elements(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Return whether two arrays have the same type, shape, strides and bits."""
    if mine.dtype != other.dtype or mine.shape != other.shape or mine.strides != other.strides:
        return False
    return mine.flags.writeable == other.flags.writeable and mine.tobytes() == other.tobytes()


def _is_of_python(kind: type) -> bool:
    """Return whether a class is defined in Python; objects of a class defined in C may have hidden state."""
    if not kind.__flags__ & _HEAP:
        return False
    return not any(isinstance(one, _OF_C) and one.__objclass__ is kind for one in vars(kind).values())


def _describe(tensor: Tensor) -> tuple[object, ...] | None:
    """Return the dtype, layout and flags of a ``tensor``, or None if its memory or its state cannot be compared."""
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_nested or tensor.is_quantized:
        return None
    if tensor.grad_fn is not None or tensor.grad is not None or vars(tensor) or tensor._is_zerotensor():
        return None
    places = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return tensor.dtype, places, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()


def _flat(held: dict[Any, Any]) -> list[Any]:
    return [part for pair in dict.items(held) for part in pair]


def _raw(held: Any) -> Any:
    return list.__iter__(held) if isinstance(held, list) else tuple.__iter__(held)
