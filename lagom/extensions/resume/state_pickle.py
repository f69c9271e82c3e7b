"""``pickle_state``, ``unpickle_state``: all objects of a program in one pickle, so that shared objects stay shared.

Functions of the program's modules are pickled by name. Those that are defined in a function, in a script or in a module
beside it are pickled with their code. ``call_memory.py`` leaves out data that came with the call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lagom.extensions.resume.learned_facts import LearnedFacts
from lagom.extensions.resume.old_graphs import has_live_graph, with_old_graph
from lagom.patching.replace import replaced, replaced_at
from lagom.program.payload import unpack_parts
from lagom.program.pickler import Pickler, pickled_by_value
from lagom.program.sources import is_installed

Refer = Callable[[memoryview], Any]
Globals = Mapping[str, dict[str, Any]]
"""The variables of the program's modules, by the modules' names."""
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]  # the attribute would count as a read by the program
_Lock, _RLock = type(threading.Lock()), type(threading.RLock())


class Programs:
    """Objects that a pickle refers to by name while it is written or read."""

    globals: Globals = types.MappingProxyType({})
    kept: Mapping[str, types.ModuleType] = types.MappingProxyType({})
    """Modules whose functions and classes are in the pickle, by name."""


_now = Programs()


@contextmanager
def program_globals(
    found: Globals, kept: Mapping[str, types.ModuleType] = types.MappingProxyType({})
) -> Iterator[None]:
    """Have pickles in the block refer to the variables in ``found`` by the names of their modules.

    Args:
        kept: modules whose functions and classes are in the pickle, as the process that reads it has empty ones.
    """
    before, _now.globals, _now.kept = (_now.globals, _now.kept), found, kept
    try:
        with pickled_by_value(kept.values()):
            yield
    finally:
        _now.globals, _now.kept = before


def pickle_state(
    state: Any,
    own_classes: Mapping[type, str],
    reduce: Callable[[Any], Any],
    gradient: Callable[[torch.Tensor], Any] = lambda _: None,
) -> tuple[bytes, list[memoryview]]:
    """Pickle ``state``; return the pickle and its large buffers.

    Args:
        own_classes: classes that came with the call, with the sender's ids for them.
        reduce: returns how to pickle an object, as ``__reduce_ex__`` does, or NotImplemented.
        gradient: returns an object that unpickles as the gradient of a leaf whose ``grad`` is None; None without one.

    Raises:
        Exception: a PicklingError or an object's own error, if a part of ``state`` cannot be pickled.
    """
    buffers: list[memoryview] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    pickler = _StatePickler(stream, out_of_band, own_classes)
    pickler.reduce, pickler.gradient = reduce, gradient
    pickler.dump((state, pickler.gradients))
    return stream.getvalue(), buffers


_LARGE = 1 << 16
_MAX_VERSION = 1000
"""Largest version that a restored tensor gets, since versions are counted up one by one."""


class _Gradients:
    """Gradients of the tensors that a pickle has met; pickled after all else, and put back when it is read."""

    def __init__(self) -> None:
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __reduce__(self) -> Any:
        return _put_gradients, (self.found,)


def _put_gradients(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, gradient in found:
        tensor.grad = gradient


class _StatePickler(Pickler):
    reduce: Callable[[Any], Any]
    gradient: Callable[[torch.Tensor], Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gradients = _Gradients()

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is types.FunctionType:
            reduced = _function(value)
        elif kind is types.CellType:
            reduced = types.CellType, ()
        elif isinstance(value, torch.Tensor):
            reduced = self._tensor(value)
        elif kind is weakref.ref:
            reduced = _weak, (value(),)
        elif kind is _Lock or kind is _RLock:
            if value.locked() if kind is _Lock else value._is_owned():
                raise pickle.PicklingError("a lock is held")
            reduced = threading.Lock if kind is _Lock else threading.RLock, ()
        elif isinstance(value, (types.GeneratorType, types.CoroutineType)):
            raise pickle.PicklingError(f"{value.__name__} is a generator that has begun")
        elif isinstance(value, types.ModuleType) and _now.kept.get(value.__name__) is value:
            reduced = importlib.import_module, (value.__name__,)
        elif kind in (typing.NewType, typing.ParamSpec) and value.__module__ in _now.kept:
            given = (value.__supertype__,) if kind is typing.NewType else ()
            reduced = _type_made, (kind, (value.__name__, *given), value.__module__)
        elif kind is LearnedFacts:
            reduced = value.reduced(self.memo.copy())
        elif is_filled_cache(value):
            raise pickle.PicklingError(f"{value.__qualname__} is a cache that holds values")
        else:
            reduced = self.reduce(value)
        reduced = super().reducer_override(value) if reduced is NotImplemented else reduced
        if isinstance(value, type) and isinstance(reduced, tuple) and getattr(value, "__module__", None) in _now.kept:
            return _class_made, reduced[:2], *reduced[2:]
        return reduced

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.grad_fn is not None:
            if has_live_graph(value.grad_fn):
                raise pickle.PicklingError("a tensor has a graph that no backward has used yet")
            return with_old_graph, (value.detach(), value.grad_fn.name())
        if value.is_leaf:
            gradient = _GRADIENT.__get__(value)
            if (gradient := self.gradient(value) if gradient is None else gradient) is not None:
                self.gradients.found.append((value, gradient))
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise pickle.PicklingError("a tensor has hooks")
        if type(value) is not torch.Tensor or vars(value) or value.layout != torch.strided or value.is_inference():
            return NotImplemented
        reduced = self.reduce(value)  # with ``zero_lvl=3`` its values are in shards
        reduced = super().reducer_override(value) if reduced is NotImplemented else reduced
        make, args = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:2] if reduced is NotImplemented else reduced[:2]
        return _tensor_made, (make, args, min(value._version, _MAX_VERSION))


def _tensor_made(make: Callable[..., torch.Tensor], args: tuple[Any, ...], version: int) -> torch.Tensor:
    """Make a tensor with the original's version, by which lagom notices the tensors that a forward changes in place."""
    made = make(*args)
    found = made.data.requires_grad_(made.requires_grad)  # a tensor of version 0
    for _ in range(version):
        torch.autograd.graph.increment_version(found)
    return found


def _type_made(kind: Any, given: tuple[Any, ...], module: str) -> Any:
    found = kind(*given)
    found.__module__ = module
    return found


def _class_made(make: Callable[..., type], given: tuple[Any, ...]) -> type:
    """Make a class of the program again, without the hooks of its bases and metaclass, which have run once."""
    parts = [one for part in given for one in (part if isinstance(part, tuple) else (part,))]
    with ExitStack() as stack:
        for kind in {base for one in parts if isinstance(one, type) for base in one.__mro__}:
            for name, quiet in _quiet_hooks(kind).items():
                hook = getattr(vars(kind).get(name), "__func__", vars(kind).get(name))
                if isinstance(hook, types.FunctionType) and not is_installed(hook.__code__.co_filename):
                    stack.enter_context(replaced(kind, name, quiet))
        return make(*given)


def _quiet_hooks(kind: type) -> dict[str, Any]:
    """Return functions that replace the hooks which Python calls for a new class."""

    owner: Any = kind

    def made(meta: Any, name: str, bases: tuple[type, ...], variables: dict[str, Any], **_: Any) -> Any:
        return super(owner, meta).__new__(meta, name, bases, variables)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    of_metaclass = {"__new__": staticmethod(made), "__init__": nothing} if issubclass(kind, type) else {}
    return {"__init_subclass__": classmethod(nothing), **of_metaclass}


def _weak(value: Any) -> Any:
    return weakref.ref(value if value is not None else _Gone())


class _Gone:
    pass


def _function(function: types.FunctionType) -> Any:
    module = _module_of(function.__globals__)
    if module is not None and module.startswith("lagom.") and (place := replaced_at(function)) is not None:
        return getattr, place
    if module is None and function.__closure__:
        raise pickle.PicklingError(f"{function.__qualname__} has variables of its own, and belongs to no module")
    if module is None:
        return NotImplemented
    if module not in _now.kept and _found(module, function.__qualname__) is function:
        return (_found, (module, function.__qualname__)) if module in _now.globals else NotImplemented
    cells = function.__closure__ or ()
    contents = [(cell, *_content(cell)) for cell in cells]
    names = ("__qualname__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__module__")
    state = {name: getattr(function, name) for name in names}, dict(vars(function)), contents
    made = _made, (function.__code__, module, function.__name__, cells)
    return (*made, state, None, None, _fill)


def _module_of(variables: dict[str, Any]) -> str | None:
    name = variables.get("__name__")
    if not isinstance(name, str):
        return None
    if _now.globals.get(name) is variables:
        return name
    module = sys.modules.get(name)
    return name if module is not None and name not in _now.globals and vars(module) is variables else None


def globals_of(module: str) -> dict[str, Any]:
    """Return the variables of a module by its name."""
    found = _now.globals.get(module)
    return vars(importlib.import_module(module)) if found is None else found


def _found(module: str, name: str) -> Any:
    value: Any = None
    variables: Any = globals_of(module)
    for part in name.split("."):
        value = variables.get(part) if isinstance(variables, dict) else getattr(variables, part, None)
        variables = value
    return value


def _content(cell: types.CellType) -> tuple[bool, Any]:
    try:
        return True, cell.cell_contents
    except ValueError:
        return False, None


def _made(code: types.CodeType, module: str, name: str, cells: tuple[types.CellType, ...]) -> types.FunctionType:
    return types.FunctionType(code, globals_of(module), name, None, cells)


def _fill(function: types.FunctionType, state: Any) -> None:
    attributes, own, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(own)
    fill_cells(contents)


def cell_contents(cells: Mapping[str, types.CellType]) -> list[tuple[types.CellType, bool, Any]]:
    """Return ``cells`` with what they hold, for ``fill_cells``; a cell is pickled without its content."""
    return [(cell, *_content(cell)) for cell in cells.values()]


def fill_cells(contents: Sequence[tuple[types.CellType, bool, Any]]) -> None:
    """Give cells what they held."""
    for cell, is_full, value in contents:
        if is_full:
            cell.cell_contents = value


def unpickle_state(pickled: Any, buffers: Sequence[Any]) -> Any:
    """Return the state that ``pickle_state`` has pickled."""
    return unpack_parts([pickled, *buffers])[0]


def is_data(value: Any) -> bool:
    """Return whether ``value`` is no module, class, built-in function, or function without closure variables."""
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__)
    return not isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType))


def is_filled_cache(value: Any) -> bool:
    """Return whether ``value`` is a cached function of the program that holds values, which Python does not show."""
    if type(value) is not functools._lru_cache_wrapper or not value.cache_info().currsize:
        return False
    code = getattr(inspect.unwrap(value), "__code__", None)
    return code is None or not is_installed(code.co_filename)


def standard_streams(value: Any) -> Any:
    """Return how to pickle a standard stream of this process; NotImplemented for other objects."""
    for name in ("stdin", "stdout", "stderr"):
        if value is getattr(sys, name) or value is getattr(sys, f"__{name}__"):
            return getattr, (sys, name)
    return NotImplemented
