"""``StatePart``: a part of an object that can change, read and restored without the object's own methods.

See Note [Looks at objects] in reads.py.
"""

from __future__ import annotations

import array
import pickle
import sys
import types
from _random import Random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from lagom.inspection.reads import (
    attributes,
    bases,
    class_attributes,
    class_key,
    class_name,
    describe,
    is_plain,
    is_tensor,
    read_slot,
    slots,
)

_MAX_ITEMS = 256
"""Largest number of items of a container that a key is made of, the last ones."""
_MAX_BYTES = 1 << 20
"""Size up to which an array is copied."""
_MISSING = object()


class RestoreError(Exception):
    """A part of an object's state could not be copied or restored; the text says which."""


@dataclass(frozen=True, slots=True)
class _Access:
    """Functions that read and write what objects of one class hold; none of them calls a method of a subclass."""

    copy: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None
    """Writes a copy back; None if what the objects hold cannot change."""
    held: Callable[[Any], Iterable[Any]] | None = iter
    """Returns the objects in a copy, in an order that is equal for equal states; None if a copy compares by itself."""

    def read(self, of: Any) -> list[Any]:
        """Return the objects that ``of`` holds, or a copy that compares by itself."""
        copy = self.copy(of)
        return [copy] if self.held is None else list(self.held(copy))


class StatePart:
    """One part of an object that can change: items of a container, attributes, slots, a cell, a generator's state."""

    def __init__(self, of: Any, access: _Access) -> None:
        self.of = of
        """The container, object, class or cell; for named items a dict with their names."""
        self._access = access

    def key(self) -> object:
        """Return a key that changes with the number of objects held that are no tensors, and with plain ones."""
        try:
            held = self._access.read(self.of)
        except Exception:  # a generator of the program's may do anything; a copy of it is a RestoreError
            return None
        return _key([one for one in held if not is_tensor(one)], self._access, depth=2)

    def copy(self) -> StateCopy:
        """Copy this part.

        Raises:
            RestoreError: when it cannot be copied, or the copy not be compared.
        """
        return StateCopy(self, self._access)


class StateCopy:
    """The contents of a ``StatePart`` at one moment."""

    def __init__(self, part: StatePart, access: _Access) -> None:
        self._of, self._access = part.of, access
        try:
            self._before = access.copy(part.of)
            is_readable = not self.has_changed()
        except Exception as error:
            raise RestoreError(f"holds a {class_name(part.of)} that cannot be copied ({describe(error)})") from error
        if not is_readable:
            raise RestoreError(f"holds a {class_name(part.of)} that changes whenever it is read")

    def has_changed(self) -> bool:
        """Return whether the part holds other objects than at the time of the copy."""
        now, before, held = self._access.copy(self._of), self._before, self._access.held
        if held is None:
            return bool(now != before)
        left, right = list(held(now)), list(held(before))
        return len(left) != len(right) or not all(map(is_, left, right))

    def restore(self) -> None:
        """Write the copy back if the part has changed.

        Raises:
            RestoreError: when the part has changed and cannot be written.
        """
        try:
            if self._access.write is not None and self.has_changed():
                self._access.write(self._of, self._before)
        except Exception as error:
            raise RestoreError(f"a {class_name(self._of)} cannot be restored ({describe(error)})") from error


def state_parts(value: Any) -> list[StatePart]:
    """Return the parts of ``value`` that can change: its items, its attributes and its slots."""
    held, members = attributes(value), slots(value)
    parts = [StatePart(one, access) for one in (value, held) if (access := _access_for(one)) and access.write]
    return [*parts, StatePart((value, members), _SLOTS)] if members else parts


def has_items(value: Any) -> bool:
    """Return whether ``value`` is a container, an array, a generator or a cell of Python's, numpy's or torch's."""
    return _access_for(value) is not None


def items(value: Any) -> list[Any]:
    """Return the items of a container, with the keys and values of a dict; an empty list for other objects."""
    access = _access_for(value)
    return [] if access is None or access.held is None else access.read(value)


def named_items(of: dict[str, Any], names: Iterable[str]) -> StatePart:
    """Return the items of ``of`` with these ``names`` as a part."""
    return StatePart((of, tuple(names)), _NAMED)


def class_state(kind: type) -> StatePart:
    """Return the attributes of a class as a part, except those with two underscores."""
    return StatePart(kind, _CLASS)


def value_key(value: Any, depth: int = 2) -> object:
    """Return a key that is equal for equal plain values and for plain containers of these; others by their class."""
    if is_plain(value):
        return value if value == value else "nan"
    access = _BY_ID.get(id(type(value))) if depth else None  # not of a subclass
    if access is not None and access.held is not None:
        return class_name(value), _key(access.read(value), access, depth - 1)
    return class_key(type(value))


def _key(held: list[Any], access: _Access, depth: int) -> object:
    if access.held is _in_order_of_id:  # equal sets may have equal items with other ids
        held = sorted(held, key=lambda one: repr(one) if is_plain(one) else "")
    return len(held), [value_key(one, depth) for one in held[-_MAX_ITEMS:]]


def _access_for(value: Any) -> _Access | None:
    for base in bases(type(value)):
        access = _BY_ID.get(id(base))
        if access is not None:
            return access
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and issubclass(type(value), torch.Generator):
        return _TORCH_GENERATOR
    if numpy is None or not issubclass(type(value), (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState)):
        return None
    if not issubclass(type(value), numpy.ndarray):
        return _NUMPY_GENERATOR
    return _ARRAY if value.nbytes <= _MAX_BYTES and not value.dtype.hasobject else None


def _write_dict(of: Any, pairs: list[tuple[Any, Any]], kind: Any = dict) -> None:
    """Write only what has changed, since other threads may read the dict."""
    before = dict(pairs)
    for key in [key for key in kind.keys(of) if key not in before]:
        kind.__delitem__(of, key)
    for key, value in pairs:
        if dict.get(of, key, _MISSING) is not value:
            kind.__setitem__(of, key, value)
    if not all(map(is_, kind.keys(of), before)):  # in another order
        kind.clear(of)
        for key, value in pairs:
            kind.__setitem__(of, key, value)


def _copy_named(pair: tuple[dict[str, Any], Sequence[str]]) -> list[tuple[str, Any]]:
    of, names = pair
    return [(name, dict.__getitem__(of, name)) for name in names if dict.__contains__(of, name)]


def _write_named(pair: tuple[dict[str, Any], Sequence[str]], pairs: list[tuple[str, Any]]) -> None:
    of, names = pair
    before = dict(pairs)
    for name in names:
        if name not in before:
            dict.pop(of, name, None)
        elif dict.get(of, name, _MISSING) is not before[name]:
            dict.__setitem__(of, name, before[name])


def _copy_slots(pair: tuple[Any, Sequence[Any]]) -> list[tuple[Any, Any]]:
    found = [(member, read_slot(pair[0], member, _MISSING)) for member in pair[1]]
    return [(member, value) for member, value in found if value is not _MISSING]


def _write_slots(pair: tuple[Any, Sequence[Any]], pairs: list[tuple[Any, Any]]) -> None:
    of, members = pair
    before, now = dict(pairs), dict(_copy_slots(pair))
    for member in members:
        if member in before and now.get(member, _MISSING) is not before[member]:
            member.__set__(of, before[member])
        elif member in now and member not in before:
            member.__delete__(of)


def _copy_class(kind: type) -> list[tuple[str, Any]]:
    own = class_attributes(kind)
    return [(name, value) for name, value in own.items() if type(name) is str and not name.startswith("__")]


def _write_class(kind: type, pairs: list[tuple[str, Any]]) -> None:
    before, now = dict(pairs), dict(_copy_class(kind))
    for name in now.keys() - before.keys():
        type.__delattr__(kind, name)
    for name, value in pairs:
        if now.get(name, _MISSING) is not value:
            type.__setattr__(kind, name, value)


def _write_cell(cell: types.CellType, before: list[Any]) -> None:
    if before:
        cell.cell_contents = before[0]
    else:
        del cell.cell_contents


def _copy_cell(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _copy_variable(variable: ContextVar[Any]) -> list[Any]:
    value = variable.get(_MISSING)
    return [] if value is _MISSING else [value]


def _write_variable(variable: ContextVar[Any], before: list[Any]) -> None:
    (value,) = before  # no variable can be unset
    variable.set(value)


def _replace_list(of: Any, items: list[Any]) -> None:
    list.__setitem__(of, slice(None), items)


def _replace_set(of: Any, items: list[Any]) -> None:
    set.clear(of)
    set.update(of, items)


def _replace_deque(of: Any, items: list[Any]) -> None:
    deque.clear(of)
    deque.extend(of, items)


def _replace_bytes(of: Any, content: bytes) -> None:
    bytearray.__setitem__(of, slice(None), content)


def _replace_items(of: Any, content: bytes) -> None:
    array.array.__delitem__(of, slice(None))
    array.array.frombytes(of, content)


def _write_ndarray(of: Any, content: bytes) -> None:
    numpy = sys.modules["numpy"]
    plain = of.view(numpy.ndarray)
    plain[...] = numpy.frombuffer(content, plain.dtype).reshape(plain.shape)


def _copy_torch_generator(of: Any) -> bytes:
    return bytes(sys.modules["torch"].Generator.get_state(of).numpy().data)


def _write_torch_generator(of: Any, state: bytes) -> None:
    torch = sys.modules["torch"]
    torch.Generator.set_state(of, torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _copy_numpy_generator(of: Any) -> bytes:
    random = sys.modules["numpy"].random
    if issubclass(type(of), random.RandomState):
        return pickle.dumps(random.RandomState.get_state(of, legacy=False))
    return pickle.dumps(random.Generator.bit_generator.__get__(of).state)


def _write_numpy_generator(of: Any, state: bytes) -> None:
    random = sys.modules["numpy"].random
    if issubclass(type(of), random.RandomState):
        random.RandomState.set_state(of, pickle.loads(state))
    else:
        random.Generator.bit_generator.__get__(of).state = pickle.loads(state)


def _in_order_of_id(items: list[Any]) -> list[Any]:
    return sorted(items, key=id)


def _make_table() -> dict[int, _Access]:
    ordered = _Access(
        lambda of: list(OrderedDict.items(of)),
        lambda of, pairs: _write_dict(of, pairs, OrderedDict),
        chain.from_iterable,
    )
    table: dict[Any, _Access] = {
        OrderedDict: ordered,
        dict: _Access(
            lambda of: list(dict.items(of)), _write_dict, chain.from_iterable
        ),  # dict.copy() would ask a subclass
        list: _Access(list.copy, _replace_list),
        set: _Access(lambda of: list(set.__iter__(of)), _replace_set, _in_order_of_id),
        deque: _Access(lambda of: list(deque.__iter__(of)), _replace_deque),
        tuple: _Access(lambda of: list(tuple.__iter__(of)), None),
        frozenset: _Access(lambda of: list(frozenset.__iter__(of)), None, _in_order_of_id),
        types.CellType: _Access(_copy_cell, _write_cell),
        ContextVar: _Access(_copy_variable, _write_variable),
        bytearray: _Access(lambda of: bytes(bytearray.__getitem__(of, slice(None))), _replace_bytes, None),
        array.array: _Access(array.array.tobytes, _replace_items, None),
        Random: _Access(Random.getstate, Random.setstate, None),
    }
    return {id(kind): access for kind, access in table.items()}


_BY_ID = _make_table()
"""Access to objects of classes of Python's, and of their subclasses, by the id of the class."""
_SLOTS = _Access(_copy_slots, _write_slots, chain.from_iterable)
_NAMED = _Access(_copy_named, _write_named, chain.from_iterable)
_CLASS = _Access(_copy_class, _write_class, chain.from_iterable)
_ARRAY = _Access(lambda of: sys.modules["numpy"].ndarray.tobytes(of), _write_ndarray, None)
_TORCH_GENERATOR = _Access(_copy_torch_generator, _write_torch_generator, None)
_NUMPY_GENERATOR = _Access(_copy_numpy_generator, _write_numpy_generator, None)
