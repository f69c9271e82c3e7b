"""``Surroundings``: values that a program's forwards can see besides their arguments. See Note [Surroundings]."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import types
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn

from lagom.inspection.reads import (
    attributes,
    bases,
    class_attributes,
    class_key,
    is_plain,
    is_tensor,
    module_of,
    read_slot,
    referents,
    slots,
)
from lagom.inspection.state_parts import StatePart, class_state, has_items, items, named_items, state_parts, value_key
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_MAX_ITEMS = 64
"""Largest number of items of a container, or of attributes, whose values distinguish calls."""
_MAX_SEARCHED = 4096
"""Largest number of items of a container that are searched."""
_HOLDERS = ("argparse", "collections", "queue", "types", "weakref", "_weakrefset", "_thread")
"""Modules of Python's standard library whose objects have attributes or items that the program chooses."""
WRAPPERS: tuple[Any, ...] = (
    *(staticmethod, classmethod, property, types.MethodType, types.MappingProxyType, functools.partial),
    *(type({}.keys()), type({}.values()), type({}.items()), functools.cached_property),
)
"""Classes whose objects refer to what is searched, and hold nothing else that can change."""
_CACHED = type(functools.cache(len))
"""Class of functions with a cache, which is not searched: C code keeps it."""


class Surroundings:
    """Values and objects that can change and that the forwards of ``modules`` can reach; collected once."""

    most_objects = 2000
    """Largest number of objects that are searched."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.iterates = False
        """Whether one of these values is an iterator, which cannot be restored."""
        self._places: list[tuple[Any, Any]] = []
        """Places of plain values and tensors.

        They are a dict or class and a key, a list and an index, an object and its slot, or a cell and None.
        """
        self.parts: list[StatePart] = []
        """What can change in the objects that were found."""
        self._seen: dict[int, object] = {id(module): module for module in modules}
        self._classes: set[int] = set()
        for module in modules:
            if origin(module_of(type(module))) != "core":
                own = module.__dict__
                self._search_values(own, (n for n in own if n not in _MODULE_ATTRIBUTES and not is_plain(own[n])))
                self._search_slots(module)
                self._search_class(type(module))
        self._seen.clear()  # otherwise it would keep modules alive

    def forget_parts(self) -> None:
        """Drop ``parts``, which keep objects alive, and so the modules that these hold."""
        self.parts.clear()

    def flags(self) -> tuple[object, ...]:
        """Return a key that changes when a forward might take another way: by a switch, or a number's sign."""
        return tuple([_value_flag(_read_value(of, key)) for of, key in self._places])

    def state(self) -> object:
        """Return a key that changes when any of the values has changed."""
        places = [_item_key(_read_value(of, key)) for of, key in self._places]
        return places, [part.key() for part in self.parts]

    @property
    def num_places(self) -> int:
        """Number of values that ``flags`` looks at."""
        return len(self._places)

    def find_in(self, other: Surroundings) -> list[tuple[int, int]]:
        """Return pairs of indices, here and in ``other``, of the places that both have."""
        found = {(id(of), key): index for index, (of, key) in enumerate(other._places)}
        places = [(id(of), key) for of, key in self._places]
        return [(index, found[place]) for index, place in enumerate(places) if place in found]

    def keep(self, indices: Sequence[int]) -> None:
        """Look at the places with these ``indices`` only, in this order."""
        self._places = [self._places[index] for index in indices]

    def _search_class(self, kind: type) -> None:
        for one in bases(kind):
            if origin(module_of(one)) == "program" and id(one) not in self._classes:
                self._classes.add(id(one))
                names = [name for name in class_attributes(one) if type(name) is str]
                self._search_values(one, (name for name in names if not (name.startswith("__") and name != "__call__")))
                self.parts.append(class_state(one))

    def _search_function(self, function: types.FunctionType) -> None:
        if origin(function.__module__) != "program":
            return
        codes, names = [function.__code__], set[str]()
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            names.update(code.co_names)
        self._search_names(function.__globals__, names)
        for cell in function.__closure__ or ():
            self.parts += state_parts(cell)
            self._add_named(cell, None, _read_value(cell, None))
        self._search_each((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        self._search_state(function)

    def _search_names(self, held: dict[str, Any], names: set[str]) -> None:
        self.parts.append(named_items(held, sorted(names)))
        for name in sorted(name for name in names if dict.__contains__(held, name)):
            value = dict.get(held, name)
            if type(value) is not types.ModuleType and origin(module_of(type(value))) != "library":
                self._add_named(held, name, value)
                continue
            of_module = attributes(value) or {}
            if origin(of_module.get("__name__")) == "program" and self._is_new(value):
                self._search_names(of_module, names)  # settings: their attributes are looked up by name

    def _add_named(self, of: Any, key: Any, value: Any) -> None:
        """Add what a function calls by a name: a program may put another function in its place."""
        if type(value) is types.FunctionType:
            self._places.append((of, key))
        self._add_value(of, key, value)

    def _search_values(self, held: Any, names: Iterable[Any]) -> None:
        for index, name in enumerate(list(islice(names, _MAX_SEARCHED))):
            self._add_value(held, name, _read_value(held, name), is_place=index < _MAX_ITEMS)

    def _add_value(self, of: Any, key: Any, value: Any, *, is_place: bool = True) -> None:
        if is_plain(value) or is_tensor(value):
            if is_place:
                self._places.append((of, key))
        elif self._is_new(value):
            self._search_object(value)

    def _search_object(self, value: Any) -> None:
        kind = type(value)  # isinstance() would ask a proxy for its class
        module = module_of(kind)
        if issubclass(kind, types.FunctionType):
            self._search_function(value)
        elif issubclass(kind, type):
            self._search_class(value)
        elif issubclass(kind, WRAPPERS):
            self._search_each(referents(value))
        elif issubclass(kind, _CACHED):
            self._search_each((attributes(value) or {}).values())
        elif has_items(value):
            if not (issubclass(kind, dict) and dict.__contains__(value, "__module__")):  # a class's own
                self._search_state(value)
        elif any("__next__" in class_attributes(one) for one in bases(kind)):
            self.iterates = True
        elif not issubclass(kind, nn.Module) and (origin(module) != "core" or module in _HOLDERS):
            self._search_state(value)

    def _search_state(self, value: Any) -> None:
        """Search the items, attributes and slots of an object, and its class."""
        self.parts += state_parts(value)
        holders: tuple[Any, ...] = value, attributes(value)
        for held in holders:
            if issubclass(type(held), dict):
                self._search_values(held, dict.keys(held))
            elif issubclass(type(held), list):
                numbers = [index for index, item in enumerate(list.copy(held)[:_MAX_ITEMS]) if is_plain(item)]
                self._places += [(held, index) for index in numbers]
        if not issubclass(type(value), dict):
            self._search_each(items(value))
        self._search_slots(value)
        self._search_class(type(value))

    def _search_slots(self, value: Any) -> None:
        for member in slots(value):
            self._add_value(value, member, read_slot(value, member))

    def _search_each(self, values: Iterable[Any]) -> None:
        for value in islice(values, _MAX_SEARCHED):
            if self._is_new(value):
                self._search_object(value)

    def _is_new(self, value: object) -> bool:
        if is_plain(value) or is_tensor(value):
            return False
        if id(value) in self._seen or len(self._seen) > self.most_objects:
            return False
        self._seen[id(value)] = value
        return True


def _read_value(of: Any, key: Any) -> Any:
    kind = type(of)
    if type(key) is types.MemberDescriptorType:
        return read_slot(of, key)
    if issubclass(kind, dict):
        return dict.get(of, key)  # a subclass's own get may create missing items
    if issubclass(kind, list):
        return list.__getitem__(of, key) if key < list.__len__(of) else None
    if issubclass(kind, type):
        return class_attributes(of).get(key)
    try:
        return of.cell_contents
    except ValueError:  # not filled yet
        return None


def _value_flag(value: Any) -> object:
    kind = type(value)
    if kind is int or kind is float:
        return (value > 0) - (value < 0)
    if kind is types.FunctionType:
        code = value.__code__
        return code.co_filename, code.co_firstlineno, code.co_name
    return value if is_plain(value) else class_key(kind)


def _item_key(value: Any) -> object:
    if is_tensor(value):
        return None if value.is_inference() else value._version
    return value_key(value, 0)


def origin(name: Any) -> str:
    """Return where the module ``name`` comes from: "core" (torch, numpy, lagom, Python), "library" or "program"."""
    if type(name) is str or name is None:
        return _origin_of(name or "")
    return "core"  # a class of C code whose objects have a module's name each, so that the class has a descriptor


@cache
def _origin_of(name: str) -> str:
    top = name.partition(".")[0]
    if top in _CORE or (top in sys.stdlib_module_names and top != "__main__"):
        return "core"
    path = getattr(sys.modules.get(top), "__file__", None) or ""
    return "library" if "site-packages" in path or "dist-packages" in path else "program"


@contextmanager
def watched_writes() -> Iterator[list[str]]:
    """Collect the names of files that this thread opens for writing, and of the program's loggers that it uses."""
    _watch_files()
    before, _watched.names = getattr(_watched, "names", None), []
    original = logging.Logger.handle

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if getattr(_watched, "names", None) is not None and origin(logger.name) == "program":
            _watched.names.append(logger.name)
        original(logger, record)

    try:
        with replaced(logging.Logger, "handle", handle):
            yield _watched.names
    finally:
        _watched.names = before


_watched = threading.local()


@cache
def _watch_files() -> None:
    """Add an audit hook for opened files, which Python cannot remove again."""
    sys.addaudithook(_note_file)


def _note_file(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and getattr(_watched, "names", None) is not None:
        path, _, flags = args
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not any(part in str(path) for part in CACHE_FILES):
            _watched.names.append(str(path))


CACHE_FILES = ("__pycache__", "/.cache/", "torchinductor", "/.triton/", "/dev/")
"""Parts of the names of files that are no output of a program."""
_CORE = frozenset(("torch", "numpy", "lagom", "builtins"))
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


# Note [Surroundings]
#
# A probe runs a forward more often than the program does (see Note [Probe] in probe.py), and its finding holds as long
# as the forward takes the same branches. Attributes of modules are restored, and calls are distinguished by them. But a
# forward may also count its calls in a global variable, draw from a generator of its own, or ask a config whether to
# mix rows in this epoch. So the values that its code can reach are collected, up to ``most_objects``: attributes of
# modules; the globals and closures that their methods name; default values of arguments, except numbers, texts and
# tensors; and so on through functions and objects of the program. Objects of libraries count by their values, not by
# their code.
#
# A call that changes one of these values may have filled a cache, so the next call is examined like a first one. After
# two such calls the module is not probed, and runs whole. Calls that differ in a switch (a bool, a text or None), the
# sign of a number, or the function behind a name are of different kinds, and each kind is probed. Numbers count by
# their sign only, since counters and schedules of a loop are among them: otherwise each value would be probed. A
# forward that opens a file for writing, or logs, in its first call runs whole too. State inside C code is not seen.
