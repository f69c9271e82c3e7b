"""``Surroundings``: values that a program's forwards can see besides their arguments. See Note [Surroundings]."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import types
from collections import deque
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_MAX_OBJECTS = 2000
"""Largest number of objects that are searched."""
_MAX_ITEMS = 64
"""Largest number of items of a container, or of attributes, that are searched or compared."""
_PLAIN = frozenset((bool, int, float, str, type(None)))
_NAMESPACES = ("Namespace", "SimpleNamespace")
"""Classes of Python's standard library whose objects have attributes that the program chooses."""
_CONTAINERS = (dict, list, tuple, set, deque)


class Surroundings:
    """Values, containers and generators that the forwards of ``modules`` can reach; collected once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.iterates = False
        """Whether one of these values is an iterator, which cannot be restored."""
        self._places: list[tuple[Any, Any]] = []
        """Places of plain values and tensors: a dict or class and a key, a list and an index, or a cell and None."""
        self._containers: list[Any] = []
        self._states: list[Callable[[], object]] = []
        """Functions that return the states of generators and arrays."""
        self._seen: dict[int, object] = {id(module): module for module in modules}
        for module in modules:
            if _origin(type(module).__module__) != "core":
                own = module.__dict__
                self._search_values(own, (n for n in own if n not in _MODULE_ATTRIBUTES and type(own[n]) not in _PLAIN))
                self._search_class(type(module))
        self._seen.clear()  # otherwise it would keep modules alive

    def flags(self) -> tuple[object, ...]:
        """Return a key that changes when a forward might take another way: by a switch, or a number's sign."""
        return tuple([_value_flag(_read_value(of, key)) for of, key in self._places])

    def state(self) -> object:
        """Return a key that changes when any of the values has changed."""
        places = [_item_key(_read_value(of, key)) for of, key in self._places]
        return places, [_container_key(one) for one in self._containers], [state() for state in self._states]

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
        for one in kind.__mro__:
            if _origin(one.__module__) == "program" and self._is_new(one):
                names = list(vars(one))
                self._search_values(one, (name for name in names if not (name.startswith("__") and name != "__call__")))

    def _search_function(self, function: types.FunctionType) -> None:
        if _origin(function.__module__) != "program":
            return
        codes, names = [function.__code__], set[str]()
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            names.update(code.co_names)
        self._search_names(function.__globals__, names)
        for cell in function.__closure__ or ():
            self._add_value(cell, None, _read_value(cell, None))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if self._is_new(default):
                self._search_object(default)

    def _search_names(self, held: dict[str, Any], names: set[str]) -> None:
        for name in sorted(names.intersection(held)):
            value = held[name]
            if not issubclass(type(value), types.ModuleType):
                self._add_value(held, name, value)
            elif _origin(value.__name__) == "program" and self._is_new(value):
                self._search_names(vars(value), names)  # settings: their attributes are looked up by name

    def _search_values(self, held: Any, names: Iterable[Any]) -> None:
        for name in list(names)[:_MAX_ITEMS]:
            self._add_value(held, name, _read_value(held, name))

    def _add_value(self, of: Any, key: Any, value: Any) -> None:
        if type(value) in _PLAIN or issubclass(type(value), torch.Tensor):
            self._places.append((of, key))
        elif self._is_new(value):
            self._search_object(value)

    def _search_object(self, value: Any) -> None:
        kind = type(value)  # isinstance() would ask a proxy for its class
        if issubclass(kind, (staticmethod, classmethod, types.MethodType)):
            self._search_object(value.__func__)
        elif issubclass(kind, property):
            self._search_object(value.fget)
        elif issubclass(kind, types.FunctionType):
            self._search_function(value)
        elif issubclass(kind, type):
            self._search_class(value)
        elif (state := _make_state_reader(value)) is not None:
            self._states.append(state)
        elif issubclass(kind, _CONTAINERS):
            self._search_container(value)
        elif hasattr(kind, "__next__"):
            self.iterates = True
        elif not issubclass(kind, nn.Module) and (_origin(kind.__module__) != "core" or kind.__name__ in _NAMESPACES):
            try:
                held = object.__getattribute__(value, "__dict__")
            except AttributeError:  # slots
                return
            self._search_container(held)
            self._search_class(kind)

    def _search_container(self, container: Any) -> None:
        self._containers.append(container)
        if isinstance(container, dict):
            self._search_values(container, dict.keys(container))
            return
        for index, item in enumerate(list(container)[:_MAX_ITEMS]):
            if isinstance(container, list) and type(item) in _PLAIN:
                self._places.append((container, index))
            elif self._is_new(item):
                self._search_object(item)

    def _is_new(self, value: object) -> bool:
        if type(value) in _PLAIN or issubclass(type(value), torch.Tensor):
            return False
        if id(value) in self._seen or len(self._seen) > _MAX_OBJECTS:
            return False
        self._seen[id(value)] = value
        return True


def _make_state_reader(value: Any) -> Callable[[], object] | None:
    """Return a function that returns the state of a generator or an array; None for other objects."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if issubclass(kind, torch.Generator):
        return lambda: bytes(value.get_state().numpy().data)
    if issubclass(kind, random.Random):
        return lambda: value.getstate()
    if numpy is None:
        return None
    if issubclass(kind, numpy.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if issubclass(kind, numpy.random.RandomState):
        return lambda: repr(value.get_state())
    if issubclass(kind, numpy.ndarray) and value.nbytes < 1 << 20 and not value.dtype.hasobject:
        return lambda: bytes(value.tobytes())
    return None


def _read_value(of: Any, key: Any) -> Any:
    if isinstance(of, dict):
        return dict.get(of, key)  # a subclass's own get may create missing items
    if isinstance(of, list):
        return of[key] if key < len(of) else None
    if isinstance(of, type):
        return vars(of).get(key)
    try:
        return of.cell_contents
    except ValueError:  # not filled yet
        return None


def _value_flag(value: Any) -> object:
    kind = type(value)
    if kind is int or kind is float:
        return (value > 0) - (value < 0)
    return value if kind in _PLAIN else kind


def _item_key(value: Any) -> object:
    if issubclass(type(value), torch.Tensor):
        return None if value.is_inference() else value._version
    return value if type(value) in _PLAIN else type(value)


def _container_key(container: Any) -> object:
    """Return the size and items of a container, without tensors; plain values of a dict are places of their own."""
    of_dict = isinstance(container, dict)
    some = list(dict.values(container) if of_dict else container)[-_MAX_ITEMS:]
    kept = [_item_key(item) for item in some if not issubclass(type(item), torch.Tensor)]
    return len(container) - (len(some) - len(kept)), len(kept) if of_dict else kept


@cache
def _origin(name: Any) -> str:
    """Return where the module ``name`` comes from: "core" (torch, numpy, lagom, Python), "library" or "program"."""
    if not isinstance(name, (str, type(None))):
        return "core"  # a class of C code whose objects have a module's name each, so that the class has a descriptor
    top = (name or "").partition(".")[0]
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
        if getattr(_watched, "names", None) is not None and _origin(logger.name) == "program":
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
        if writes and not any(part in str(path) for part in _CACHES):
            _watched.names.append(str(path))


_CACHES = ("__pycache__", "/.cache/", "torchinductor", "/.triton/", "/dev/")
"""Parts of the names of files that are no output of a program."""
_CORE = frozenset(("torch", "numpy", "lagom", "builtins"))
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


# Note [Surroundings]
#
# A probe runs a forward more often than the program does (see Note [Probe] in probe.py), and its finding holds as long
# as the forward takes the same branches. Attributes of modules are restored, and calls are distinguished by them. But a
# forward may also count its calls in a global variable, draw from a generator of its own, or ask a config whether to
# mix rows in this epoch. So the values that its code can reach are collected, up to ``_MAX_OBJECTS``: attributes of
# modules; the globals and closures that their methods name; default values of arguments, except numbers, texts and
# tensors; and so on through functions and objects of the program. Objects of libraries count by their values, not by
# their code.
#
# A call that changes one of these values may have filled a cache, so the next call is examined like a first one. After
# two such calls the module is not probed, and runs whole. Calls that differ in a switch (a bool, a text or None), or in
# the sign of a number, are of different kinds, and each kind is probed. Numbers count by their sign only, since
# counters and schedules of a loop are among them: otherwise each value would be probed. A forward that opens a file for
# writing, or logs, in its first call runs whole too. State inside C code is not seen.
