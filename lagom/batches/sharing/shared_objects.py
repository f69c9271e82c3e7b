"""``reach_shared_memory``, ``SharedMappings``: memory by which a loader's workers could pass data to the program."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import mmap
import os
import re
import sys
import types
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

_MAX_ITEMS = 64
"""Number of items of a container that are searched."""
_MAX_OBJECTS = 5_000
"""Number of objects that are searched, those nearest to the roots first."""
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, np.dtype))
"""Kinds of values that hold no other objects."""
_CONTAINERS = (list, tuple, set, frozenset, deque)
_SHARING = ("multiprocessing", "_multiprocessing", "ctypes", "_ctypes", "socket", "_socket", "_posixshmem")
"""Modules whose objects are shared between processes, or point to raw memory."""
_CORE = frozenset(("torch", "numpy", "lagom", "builtins"))
_HARMLESS = re.compile(r"/dev/shm/sem\.|/dev/shm/nccl|/dev/nvidia|lagom")
"""Names that do not count: semaphores (found by ``shared_objects.py``), and memory of lagom and of drivers."""
_BATCH = re.compile(r"/torch_(\d+)_")
"""Names of storages that torch shares; the group is the id of the process that made the storage."""


def reach_shared_memory(roots: Iterable[object]) -> bool:
    """Return whether shared memory, pipes or writable files are among the ``reachable`` objects of ``roots``."""
    return any(_is_shared(value) for value in reachable(roots))


def reachable(roots: Iterable[object], most: int = _MAX_OBJECTS) -> Iterator[Any]:
    """Yield up to ``most`` objects that can be reached from ``roots``, those nearest first.

    The search follows attributes, containers, closures, and the globals that functions of the program name. It does not
    follow the parts of lagom's own objects whose class has the attribute ``lagom_cache``: they are caches, whose
    content does not change their results.
    """
    seen: dict[int, object] = {}  # keeps temporary objects alive, so that their ids are not reused
    left = deque(roots)
    while left and len(seen) < most:
        value = left.popleft()
        if type(value) in PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if not getattr(type(value), "lagom_cache", False):
            left.extend(parts_of(value))


def _is_shared(value: Any) -> bool:
    kind = type(value)  # isinstance() would ask a proxy for its class
    if issubclass(kind, torch.Tensor):
        return bool(value.layout is torch.strided and value.is_cpu and value.is_shared())
    if issubclass(kind, np.ndarray):
        return _lies_in_shared_memory(value)
    if issubclass(kind, io.IOBase):
        return not value.closed and value.writable() and value not in (sys.stdout, sys.stderr)
    if issubclass(kind, type):
        return False
    if issubclass(kind, (mmap.mmap, memoryview)):
        return True
    return any(one.__module__.partition(".")[0] in _SHARING for one in kind.__mro__)


def _lies_in_shared_memory(array: Any) -> bool:
    """Return whether the memory of ``array`` may be shared with other processes, and written."""
    if not array.flags.writeable:
        return False
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return array.mode != "c"
        array = array.base
    if isinstance(array, memoryview):
        array = array.obj
    if isinstance(array, torch.Tensor):
        return bool(array.is_shared())
    return array is not None and type(array) not in (bytes, bytearray)


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the objects that ``value`` holds."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return
    if issubclass(kind, (staticmethod, classmethod)):
        yield value.__func__
    elif issubclass(kind, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif issubclass(kind, (types.BuiltinMethodType, types.MethodWrapperType)):
        yield value.__self__
    elif issubclass(kind, property):
        yield from (value.fget, value.fset)
    elif issubclass(kind, types.FunctionType):
        yield from _function_parts(value)
    elif issubclass(kind, type):
        yield from _class_parts(value)
    elif issubclass(kind, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif issubclass(kind, functools._lru_cache_wrapper):
        yield value.__wrapped__
    elif issubclass(kind, dict):
        yield from itertools.islice(dict.values(value), _MAX_ITEMS)
    elif issubclass(kind, _CONTAINERS):
        yield from itertools.islice(iter(value), _MAX_ITEMS)
    elif issubclass(kind, np.ndarray):
        yield from value.ravel()[:_MAX_ITEMS].tolist() if value.dtype.hasobject else ()
    if not (issubclass(kind, (types.ModuleType, type)) or _is_pythons(kind.__module__)):
        yield from _attributes(value)
        yield kind


def _attributes(value: Any) -> Iterator[Any]:
    for name in ("__dict__", *(name for one in type(value).__mro__ for name in _slot_names(one))):
        with contextlib.suppress(AttributeError):
            held = object.__getattribute__(value, name)
            yield from list(held.values()) if name == "__dict__" else (held,)


def _slot_names(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _class_parts(kind: type) -> Iterator[Any]:
    for one in kind.__mro__:
        if _is_of_the_program(one.__module__):
            yield from [value for name, value in vars(one).items() if name != "__slotnames__"]  # added by pickle


def _function_parts(function: types.FunctionType) -> Iterator[Any]:
    yield from (function.__defaults__ or (), function.__kwdefaults__ or ())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    if not _is_of_the_program(function.__module__):
        return
    codes, names = [function.__code__], set[str]()
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        names.update(code.co_names)
    yield from _named_parts(function.__globals__, names)


def _named_parts(held: dict[str, Any], names: set[str]) -> Iterator[Any]:
    imported = {name: sys.modules[name] for name in names.intersection(sys.modules)}  # imported inside the function
    for name in sorted(names.intersection(imported | held)):
        value = held.get(name, imported.get(name))
        if not isinstance(value, types.ModuleType):
            yield value
        elif _is_of_the_program(value.__name__):
            yield from (vars(value)[inner] for inner in sorted(names.intersection(vars(value))))


@functools.cache
def _is_of_the_program(module: str | None) -> bool:
    """Return whether a module is the program's own, and not lagom's, Python's or an installed library's."""
    top = (module or "").partition(".")[0]
    if top in _CORE or _is_pythons(module):
        return False
    path = getattr(sys.modules.get(top), "__file__", None) or ""
    return "site-packages" not in path and "dist-packages" not in path


@functools.cache
def _is_pythons(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in sys.stdlib_module_names and top != "__main__"


class SharedMappings:
    """Detects writable shared memory that was mapped into this process after this object was made."""

    def __init__(self) -> None:
        self._before = _find()

    def has_new(self) -> bool:
        """Return whether new shared memory was mapped, other than batches that workers have sent."""
        return not _find() <= self._before


def find_files(addresses: Iterable[int]) -> set[tuple[str, ...]]:
    """Return device and inode of each shared mapping that contains one of ``addresses``."""
    wanted = sorted(addresses)
    found: set[tuple[str, ...]] = set()
    for row in _shared_rows():
        low, high = (int(one, 16) for one in row[0].split("-"))
        if bisect_left(wanted, low) < bisect_left(wanted, high):
            found.add((row[3], row[4]))
    return found


def _find() -> set[tuple[str, ...]]:
    found = {(row[3], row[4], row[-1]) for row in _shared_rows() if not _HARMLESS.search(row[-1])}
    return {row for row in found if (made := _BATCH.search(row[-1])) is None or int(made[1]) == os.getpid()}


def _shared_rows() -> list[list[str]]:
    try:
        with open("/proc/self/maps") as file:
            return [line.rstrip().split(None, 5) for line in file if " rw-s " in line]
    except OSError:  # not on Linux
        return []
