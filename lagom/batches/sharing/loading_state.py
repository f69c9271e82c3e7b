"""``LoadingState``: what the loading of samples can change in a data set and in what its code reaches.

See Note [Traces] in divided_fetch.py.
"""

from __future__ import annotations

import datetime
import decimal
import dis
import functools
import gc
import io
import logging
import operator
import pathlib
import random
import re
import struct
import sys
import threading
import types
import weakref
import zlib
from abc import ABC
from collections import namedtuple
from enum import Enum
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lagom.forward.rows.surroundings import WRAPPERS, Surroundings, origin
from lagom.inspection.reads import (
    attributes,
    bases,
    class_attributes,
    class_name,
    describe,
    is_plain,
    is_tensor,
    module_of,
)
from lagom.inspection.state_parts import RestoreError, StateCopy, has_items, items, named_items, state_parts

if TYPE_CHECKING:
    from collections.abc import Iterable


_MANY = 256
"""Number of items from which on those of a container are looked at only now and then."""
_MOST_NOW = 1 << 20
"""Most bytes of arrays and tensors whose content is compared at each batch."""
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
"""Instructions with the name of a variable of the module."""
_HEAP = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, a flag of classes that are made at run time: all classes in Python."""
_CONSTANT: tuple[type, ...] = (
    *(range, slice, type(Ellipsis), re.Pattern, struct.Struct, pathlib.PurePath, decimal.Decimal, Enum, np.generic),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, operator.itemgetter, operator.attrgetter),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.dtype, np.ufunc, types.CodeType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.ClassMethodDescriptorType, types.UnionType, types.NotImplementedType, types.NoneType, re.Match),
    types.GenericAlias,
    *(type(threading.Lock()), type(threading.RLock()), operator.methodcaller, BaseException, logging.Logger),
    *(type(namedtuple("_", "x").x), type(vars(ABC)["_abc_impl"])),  # type: ignore[attr-defined]
)
"""Classes whose objects hold nothing that loading could change, but caches of their own."""
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Classes of plain values."""
_CACHED = type(functools.cache(len))
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
"""Classes of methods of C code that are bound to an object."""
_ANY_VARIABLE = frozenset(("globals", "exec", "eval"))
"""Functions that reach variables by names that no search of the code finds."""


class LoadingState(Surroundings):
    """The objects that the loading of samples can reach and change, collected once, and what they hold.

    Attributes, items of containers, variables of the program's functions and elements of arrays are compared; what C
    code keeps to itself is not seen.

    Args:
        roots: the data set, and functions that make samples.
    """

    most_objects = 10_000

    def __init__(self, roots: Iterable[object]) -> None:
        super().__init__(())
        self.hidden = ""
        """What was found whose state cannot be seen, in words; empty if there is nothing."""
        self._known: set[int] = set()
        self._far: set[int] = set()
        self._numbers: dict[int, Any] = {}
        self._caches: list[Any] = []
        self._records: list[tuple[list[Any], type]] = []
        self._containers: list[Any] = []
        """Large containers, whose sizes are compared at each batch."""
        self._objects: list[np.ndarray[Any, Any]] = []
        self._frames: list[Any] = []
        self._inner: dict[int, set[str]] = {}
        """For each module of the program, the names that have been searched in it."""
        try:
            self._search_each(tuple(roots))
        except Exception as error:  # an object of the program's may do anything
            self.hidden = f"objects that cannot be looked at ({describe(error)})"
        if len(self._seen) > self.most_objects:
            self.hidden = self.hidden or f"more than {self.most_objects:,} objects"
        self._known.update(self._seen)
        self._seen.clear()
        self.copy()

    def copy(self) -> None:
        """Remember what the objects hold now."""
        try:
            parts = [(index in self._far, part.copy()) for index, part in enumerate(self.parts)]
        except RestoreError as error:
            self.hidden, parts = self.hidden or str(error), []
        self._near: list[StateCopy] = [one for is_far, one in parts if not is_far]
        self._distant = [one for is_far, one in parts if is_far]
        numbers = list(self._numbers.values())
        self._small = [(one, _content(one)) for one in numbers if _num_bytes(one) <= _MOST_NOW]
        self._large = [(one, _mark(one)) for one in numbers if _num_bytes(one) > _MOST_NOW]
        objects = [(one, one.ravel().tolist()) for one in self._objects]
        self._few_objects = [(one, held) for one, held in objects if len(held) <= _MANY]
        self._many_objects = [(one, held) for one, held in objects if len(held) > _MANY]
        self._parts_of_frames = [(one, _parts_of_frame(one)) for one in self._frames]
        self._contents = [(_flat(items, kind), items, kind) for items, kind in self._records]
        self._sizes = list(map(_size, self._containers))
        self._counts = [cache.cache_info() for cache in self._caches]

    def has_changed(self) -> bool:
        """Return whether the objects hold something else; items of large containers and large arrays are left out."""
        try:
            return self._has_changed()
        except Exception:  # what has taken the place of an object may do anything
            return True

    def _has_changed(self) -> bool:
        return (
            any(one.has_changed() for one in self._near)
            or any(_content(one) != content for one, content in self._small)
            or self._sizes != list(map(_size, self._containers))
            or any(not _are_same(held, one.ravel().tolist()) for one, held in self._few_objects)
            or any(not _are_same(parts, _parts_of_frame(one)) for one, parts in self._parts_of_frames)
            or any(cache.cache_info() != before for cache, before in zip(self._caches, self._counts, strict=True))
        )

    def has_changed_anywhere(self) -> bool:
        """Return whether any object holds something else; this takes long for large data sets."""
        return self.has_changed() or self.has_changed_far()

    def has_changed_far(self) -> bool:
        """Return whether large containers or arrays hold something else, which ``restore`` leaves out."""
        return (
            any(one.has_changed() for one in self._distant)
            or any(_mark(one) != mark for one, mark in self._large)
            or any(not _are_same(before, _flat(items, kind)) for before, items, kind in self._contents)
            or any(not _are_same(held, one.ravel().tolist()) for one, held in self._many_objects)
        )

    def restore(self) -> None:
        """Restore what ``has_changed`` looks at.

        Raises:
            RestoreError: when a part cannot be restored.
        """
        for one in self._near:
            one.restore()
        for numbers, content in self._small:
            if _content(numbers) != content:
                _as_bytes(numbers)[...] = np.frombuffer(content, np.uint8)
        for array, held in self._few_objects:
            if not _are_same(held, array.ravel().tolist()):
                array.flat[:] = _array_of_objects(held)
        if any(not _are_same(parts, _parts_of_frame(frame)) for frame, parts in self._parts_of_frames):
            raise RestoreError("a pandas object has got other columns, which cannot be undone")
        if any(cache.cache_info() != before for cache, before in zip(self._caches, self._counts, strict=True)):
            raise RestoreError("a function with a cache has been called, which cannot be undone")

    def holds(self, value: Any) -> bool:
        """Return whether ``value``, or a mutable part of it, is one of the objects or shares memory with one."""
        if is_plain(value) or issubclass(type(value), _CONSTANT):
            return False
        address = _address(value)
        if id(value) in self._known or (address and (address in self._numbers or address in self._known)):
            return True
        if is_tensor(value) or issubclass(type(value), np.ndarray):
            return False
        held = attributes(value) or {}
        parts = value.values() if issubclass(type(value), dict) else value if _is_sequence(value) else ()
        return any(map(self.holds, (*parts, *held.values())))

    def _add_value(self, of: Any, key: Any, value: Any, *, is_place: bool = True) -> None:
        if not self._add_numbers(value):
            super()._add_value(of, key, value, is_place=False)

    def _search_each(self, values: Iterable[Any]) -> None:
        items = list(values)
        kinds = set(map(type, items))
        if all(map(is_constant, kinds)):
            return
        if len(items) > _MANY and len(kinds) == 1 and self._add_records(items, *kinds):
            return
        start = len(self.parts)
        for value in items:
            if not self._add_numbers(value) and self._is_new(value):
                self._search_object(value)
        if len(items) > _MANY:
            self._far.update(range(start, len(self.parts)))

    def _add_records(self, items: list[Any], kind: type) -> bool:
        """Add many tuples, lists or dicts of plain values, if ``items`` are these, as one; return whether they are."""
        if kind not in (tuple, list, dict):
            return False
        values = list(chain.from_iterable(map(dict.values, items) if kind is dict else items))
        inner = [value for value in values if type(value) in (list, tuple)]
        if not all(map(is_constant, {*map(type, values), *map(type, chain.from_iterable(inner))} - {list, tuple})):
            return False
        if any(type(value) is list for value in inner):  # such as the boxes of a picture
            self._records.append((inner, list))
            self._known.update(map(id, inner))
        self._known.update(map(id, items))
        if kind is not tuple:
            self._records.append((items, kind))
        return True

    def _search_state(self, value: Any) -> None:
        start = len(self.parts)
        super()._search_state(value)
        if has_items(value) and issubclass(type(value), (dict, list, set)) and len(items(value)) > _MANY:
            self._far.add(start)
            self._containers.append(value)

    def _search_values(self, held: Any, names: Iterable[Any]) -> None:
        names = list(names)
        start = len(self.parts)
        super()._search_values(held, names)
        if len(names) > _MANY:
            self._far.update(range(start, len(self.parts)))

    def _search_class(self, kind: type) -> None:
        new = [one for one in bases(kind) if id(one) not in self._classes and origin(module_of(one)) == "program"]
        super()._search_class(kind)
        for one in new:  # also __getitem__, which no forward calls
            for value in class_attributes(one).values():
                if issubclass(type(value), types.FunctionType):
                    self._search_each((value,))

    def _search_function(self, function: types.FunctionType) -> None:
        if origin(function.__module__) != "program":
            return
        if _is_patch(function):
            self._search_each((vars(function).get("__wrapped__"),))
            return
        codes, names, modules = [function.__code__], set[str](), set[str]()
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            instructions = list(dis.get_instructions(code))
            names.update(one.argval for one in instructions if one.opname in _OF_GLOBALS)
            modules.update(one.argval for one in instructions if one.opname == "IMPORT_NAME")
        if found := (names & _ANY_VARIABLE) - function.__globals__.keys():
            self._hide(f"{min(found)}()")
        attributes_of_modules = {name for code in codes for name in code.co_names}
        self._search_globals(function.__globals__, names, attributes_of_modules)
        package = function.__globals__.get("__package__") or ""
        for name in sorted(modules):  # what the function imports itself
            for module in (sys.modules.get(name), sys.modules.get(f"{package}.{name}".strip("."))):
                self._search_module(module, attributes_of_modules)
        for cell in function.__closure__ or ():
            self._search_each((cell,))
        self._search_each((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        self._search_state(function)

    def _search_globals(self, held: dict[str, Any], names: set[str], inner: set[str]) -> None:
        """Search the variables of a module that a function names; of other modules of the program, all it may name."""
        self.parts.append(named_items(held, sorted(names)))
        for name in sorted(names & held.keys()):
            value = held[name]
            if type(value) is not types.ModuleType:
                self._add_value(held, name, value)
            else:
                self._search_module(value, inner)

    def _search_module(self, module: Any, names: set[str]) -> None:
        if type(module) is types.ModuleType and origin(module.__name__) == "program":
            known = self._inner.setdefault(id(module), set())
            new = names - known
            known |= new
            if new:
                self._search_globals(vars(module), new, names)

    def _search_object(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, _CONSTANT) or str(module_of(kind)).partition(".")[0] == "pyarrow":
            return
        if id(value) in _COMMON:
            return
        if issubclass(kind, _BOUND):
            self._search_each((value.__self__,))
        elif issubclass(kind, weakref.ref):
            self._search_each((value(), *(attributes(value) or {}).values()))
        elif issubclass(kind, types.ModuleType):
            self._search_module(value, set(vars(value)))
        elif issubclass(kind, _CACHED):
            self._caches.append(value)
            super()._search_object(value)
        elif issubclass(kind, io.IOBase):
            self._hide(f"an open file ({class_name(value)})")
        elif (frame := _arrays_of_frame(value)) is not None:
            self._frames.append(value)
            self._search_each(frame)
        elif has_items(value) or issubclass(kind, (types.FunctionType, type, *WRAPPERS)):
            super()._search_object(value)
        elif any("__next__" in class_attributes(one) for one in bases(kind)):
            self._hide("an iterator")
        elif issubclass(kind, (Dataset, nn.Module)) or _is_of_python(kind):
            self._search_state(value)
        else:
            self._hide(f"a {class_name(value)}")

    def _add_numbers(self, value: Any) -> bool:
        """Add ``value`` to the tensors and arrays whose elements are compared, if it is one."""
        if not (is_tensor(value) or issubclass(type(value), np.ndarray)):
            return False
        value = _owner(value)
        if issubclass(type(value), np.ndarray) and value.dtype.hasobject:
            if self._is_new(value):
                self._objects.append(value)
                self._search_each(value.ravel().tolist())
        elif _as_bytes(value) is None or (issubclass(type(value), np.memmap) and value.flags.writeable):
            self._hide(f"a {class_name(value)} that other processes may write, or whose elements cannot be read")
        elif is_tensor(value) or value.flags.writeable:
            address = _address(value)
            other = self._numbers.get(address)
            if other is None or _num_bytes(other) < _num_bytes(value):
                self._numbers[address] = value
        else:
            self._known.add(_address(value))
        return True

    def _hide(self, what: str) -> None:
        self.hidden = self.hidden or what


class Generators:
    """Generators of random numbers in this process, besides the global ones, and their states at creation."""

    def __init__(self) -> None:
        kinds = random.Random, np.random.Generator, np.random.RandomState, torch.Generator
        # The collector does not list what was there before a rank was forked; of that, variables of modules are seen.
        modules = [vars(module) for module in list(sys.modules.values()) if type(module) is types.ModuleType]
        values = chain(gc.get_objects(), *(list(one.values()) for one in modules))
        found = {id(one): one for one in values if issubclass(type(one), kinds) and id(one) not in _COMMON}.values()
        self._copies = [part.copy() for one in found for part in state_parts(one)[:1]]

    def have_drawn(self) -> bool:
        """Return whether one of them has another state."""
        return any(one.has_changed() for one in self._copies)


_COMMON = frozenset(map(id, (random._inst, np.random.mtrand._rand, torch.default_generator)))
"""The global generators, by their ids, whose draws are counted."""
_HOLLOW = frozenset((object, types.SimpleNamespace, threading.local, *_PLAIN))
"""Classes of C code whose objects hold attributes only, or what cannot change."""


def is_constant(kind: type) -> bool:
    """Return whether loading cannot change objects of the class ``kind``."""
    return kind in _PLAIN or issubclass(kind, _CONSTANT)


def _is_patch(function: types.FunctionType) -> bool:
    """Return whether ``function`` is lagom's, under the name of what it calls; its closure holds the whole session."""
    return str(function.__globals__.get("__name__")).partition(".")[0] == "lagom"


def _is_of_python(kind: type) -> bool:
    """Return whether attributes and slots are all that objects of ``kind`` hold: its classes are defined in Python."""
    return all(one in _HOLLOW or (one.__flags__ & _HEAP and not _is_of_c(one)) for one in bases(kind))


@functools.cache
def _is_of_c(kind: type) -> bool:
    """Return whether C code has defined a class that is made at run time."""
    of_c = types.MethodDescriptorType, types.WrapperDescriptorType
    return any(isinstance(one, of_c) and one.__objclass__ is kind for one in vars(kind).values())


def _size(container: Any) -> int:
    """Return the number of items, without a call of a subclass's own ``__len__``."""
    kind = next(one for one in (dict, list, set) if issubclass(type(container), one))
    return int(kind.__len__(container))


def _flat(items: list[Any], kind: type) -> list[Any]:
    """Return what many lists or dicts hold, in one list."""
    return list(chain.from_iterable(items if kind is list else chain.from_iterable(map(dict.items, items))))


def _are_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def _is_sequence(value: Any) -> bool:
    return issubclass(type(value), (list, tuple, set, frozenset))


def _arrays_of_frame(value: Any) -> list[Any] | None:
    """Return the arrays of a pandas DataFrame, Series or Index, whose other parts are caches; None of others."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return None
    if issubclass(type(value), (pandas.DataFrame, pandas.Series, pandas.api.extensions.ExtensionArray)):
        return [one for one in _parts_of_frame(value) if issubclass(type(one), np.ndarray)]
    return [] if issubclass(type(value), pandas.Index) else None


_OF_EXTENSION = ("_ndarray", "_data", "_mask")
"""Attributes of an array of pandas' own that hold its elements."""


def _parts_of_frame(value: Any) -> list[Any]:
    """Return the arrays that hold the elements of a DataFrame, a Series or an array of pandas' own."""
    arrays = list(value._mgr.arrays) if hasattr(value, "_mgr") else [value]
    found = [one for one in arrays if issubclass(type(one), np.ndarray)]
    for one in arrays:
        names = ("_pa_array",) if hasattr(one, "_pa_array") else _OF_EXTENSION  # pyarrow's array, or numpy's
        found += [getattr(one, name) for name in names if hasattr(one, name)]
    return found


def _address(value: Any) -> int:
    """Return where the memory of a tensor or an array begins; 0 for other values."""
    if is_tensor(value):
        return int(value.untyped_storage().data_ptr()) if value.layout is torch.strided else 0
    return int(_owner(value).ctypes.data) if issubclass(type(value), np.ndarray) else 0


def _owner(value: Any) -> Any:
    """Return the array whose memory an array views; other values as they are."""
    while issubclass(type(value), np.ndarray) and issubclass(type(value.base), np.ndarray):
        value = value.base
    return value


def _as_bytes(value: Any) -> Any:
    """Return the memory of a tensor or an array as an array of bytes; None if it cannot be read so."""
    if is_tensor(value):
        if value.layout is not torch.strided or not value.is_cpu or value.is_meta:
            return None
        storage = value.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    plain = value.view(np.ndarray)
    if not plain.size:
        return np.empty(0, np.uint8)
    flat = plain.T if plain.flags.f_contiguous else plain
    return flat.reshape(-1).view(np.uint8) if flat.flags.c_contiguous else None


def _num_bytes(value: Any) -> int:
    """Return the size of the memory that ``_as_bytes`` returns."""
    return int(value.untyped_storage().nbytes() if is_tensor(value) else value.nbytes)


def _array_of_objects(values: list[Any]) -> np.ndarray[Any, Any]:
    found = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # an assignment of all would unpack sequences
        found[index] = value
    return found


def _content(value: Any) -> bytes:
    found: bytes = _as_bytes(value).tobytes()
    return found


def _mark(value: Any) -> int:
    return zlib.crc32(_as_bytes(value))
