"""``ObjectContents``: what the objects of a program hold, for a comparison with what they hold later."""

from __future__ import annotations

import sys
import types
import zlib
from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lagom.forward.rows.restore import tensor_checksum
from lagom.forward.rows.surroundings import Surroundings
from lagom.inspection.reads import attributes, class_name, is_tensor, read_slot, slots
from lagom.inspection.state_parts import has_items
from lagom.program.sources import is_own

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_MAX_COMPARED = 100_000
"""Largest number of items of a container that are compared; of a larger one, this many of the first items."""
_MAX_NUMBERS = 64
"""Largest number of a container's items that are compared by their elements, if they are tensors or arrays."""
_MAX_SAMPLED = 1 << 20
"""Largest number of elements of an array that are compared."""
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_SEARCHED = (dict, list, tuple, set, frozenset, deque, types.SimpleNamespace)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_modules", "_parameters"}
"""Attributes of modules that change by nature, such as ``training``, or whose tensors are compared anyway."""


class ObjectContents(Surroundings):
    """Copies of the items of containers, modules and objects of the program in ``value``, and marks of its numbers.

    Both are those at creation. Code is not followed, nor are objects of libraries and random generators; of a data set,
    only tensors and arrays are compared, since it may cache samples and count them.

    Args:
        reads_parameters: whether parameters are whole on this rank; else those that can be trained count as changed.
    """

    def __init__(self, value: Any, *, reads_parameters: bool = True) -> None:
        super().__init__(())
        self._reads = reads_parameters
        self._modules: list[nn.Module] = []
        self._arrays: list[Any] = []
        self._containers: list[Any] = []
        self._search_items([value])
        modules = list({id(one): one for module in self._modules for one in module.modules()}.values())
        self._items = [(holder, items_of(holder)) for holder in (*self._containers, *modules)]
        numbers = [
            item for _, items in self._items for item in items[:_MAX_NUMBERS] if issubclass(type(item), torch.Tensor)
        ]
        numbers += [tensor for one in self._modules for tensor in (*one.parameters(), *one.buffers())]
        self.numbers = list({id(one): one for one in (*numbers, *self._arrays)}.values())
        """Tensors and arrays inside."""
        self._marks = [_mark(one, reads_parameters=reads_parameters) for one in self.numbers]

    def changed(self) -> list[Any]:
        """Return the containers, objects, tensors and arrays that are not as they were."""
        holders = [holder for holder, items in self._items if not are_same(items_of(holder), items)]
        marks = zip(self.numbers, self._marks, strict=True)
        reads = self._reads
        return holders + [one for one, mark in marks if mark is None or mark != _mark(one, reads_parameters=reads)]

    def has(self, parts: Sequence[Any], own: Collection[int] = ()) -> bool:
        """Return whether all ``parts`` are here, or equal ones; tensors by their shapes, as a checkpoint has copies.

        Args:
            own: ids of tensors that are themselves, and no copies of a part.
        """
        here = set(map(id, self.numbers))
        missing = [part for part in parts if isinstance(part, torch.Tensor) and id(part) not in here]
        copies = Counter(number.shape for number in self.numbers if id(number) not in own)
        if Counter(part.shape for part in missing) - copies:
            return False
        return all(isinstance(part, torch.Tensor) or self._has(part) for part in parts)

    def _has(self, part: Any) -> bool:
        if part is None or part is True or part is False:  # many values are equal to these by chance
            return False
        items = items_of(part)
        for holder, found in self._items:
            if holder is part or any(is_same(part, one) for one in found) or (items and are_same(items, found)):
                return True
        return any(part is one for one in self._arrays)

    def _search_object(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, nn.Module):
            self._modules.append(value)
        elif _is_array(kind):
            self._arrays.append(value)
        elif issubclass(kind, Dataset):
            held = (attributes(value) or {}).values()
            parts = [part for one in held for part in (one if type(one) in (list, tuple) else (one,))]
            self._search_items([part for part in parts if is_tensor(part) or _is_array(type(part))])
        elif class_name(value) == "Namespace" or issubclass(kind, _SEARCHED) or is_own(kind):
            super()._search_object(value)

    def _search_items(self, items: list[Any]) -> None:
        self._containers.append(items)
        self._search_each(items)

    def _search_state(self, value: Any) -> None:
        held = attributes(value)
        self._containers += [value] if has_items(value) or slots(value) else []
        self._containers += [] if held is None else [held]
        super()._search_state(value)

    def _search_class(self, kind: type) -> None:
        """Do nothing: code is not followed."""


def _is_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def items_of(holder: Any) -> list[Any]:
    """Return the items of a container, the keys and values of a dict, or the program's attributes of an object.

    No method of a program's class is called.
    """
    kind = type(holder)
    if issubclass(kind, dict):
        pairs = islice(dict.items(holder), _MAX_COMPARED)
        return [*(part for pair in pairs for part in pair), *_length(dict.__len__(holder))]
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            return [*islice(base.__iter__(holder), _MAX_COMPARED), *_length(base.__len__(holder))]
    if issubclass(kind, nn.Module):
        own = vars(holder)
        inside = [one for name in ("_modules", "_parameters") for one in (own.get(name) or {}).values()]
        names = [name for name in own if name not in _MODULE_ATTRIBUTES and not name.startswith("_")]
        return [*inside, *(part for name in names if is_own(kind) for part in (name, own[name]))]
    return [read_slot(holder, member) for member in slots(holder)]


def _length(length: int) -> list[int]:
    return [length] if length > _MAX_COMPARED else []


def are_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether both have the same items."""
    return len(left) == len(right) and all(map(is_same, left, right))


def is_same(left: Any, right: Any) -> bool:
    """Return whether both are one object, or equal values of one builtin type; no other ``__eq__`` is asked."""
    if left is right:
        return True
    kind = type(left)
    if kind is tuple and type(right) is tuple:
        return are_same(left, right)
    return kind is type(right) and kind in _PLAIN and (left == right or (left != left and right != right))


def _mark(value: Any, *, reads_parameters: bool = True) -> Any:
    """Return a key that changes with the elements of a tensor or array; None to take it for changed."""
    if not isinstance(value, torch.Tensor):
        size = value.size
        some = value.ravel("K")[:: -(-size // _MAX_SAMPLED)] if size > _MAX_SAMPLED else value
        return value.shape, str(value.dtype), None if value.dtype.hasobject else zlib.crc32(some.tobytes())
    kind = type(value)
    if not reads_parameters and issubclass(kind, nn.Parameter):
        return None if value.requires_grad else (kind, "not compared")
    if kind not in (torch.Tensor, nn.Parameter):  # a class of the program's or a library's may do anything
        return kind, "not compared"
    try:
        return value.shape, value.dtype, tensor_checksum(value)
    except Exception:  # for example a view of complex numbers that is conjugated
        return kind, value._version
