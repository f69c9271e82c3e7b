"""``CallChanges``: names of the program's objects that a call changes on the ranks. See Note [Changed objects]."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from contextlib import suppress
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.utils.data import Dataset

from lagom.program.script import Script
from lagom.program.sources import codes, is_foreign, is_installed, is_own, reachable_modules
from lagom.session.object_contents import ObjectContents, is_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lagom.program.call import Call

_MAX_VARIABLES = 500
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_DESCRIPTORS = (property, staticmethod, classmethod, types.MemberDescriptorType, types.GetSetDescriptorType)


class _Variable(NamedTuple):
    name: str
    read: Callable[[], Any]
    """Returns the present value."""


class CallChanges:
    """Remembers the objects that a call reaches outside of its function, as they are at creation.

    Args:
        reads_parameters: whether parameters are whole on this rank; else those that can be trained count as changed.
    """

    def __init__(self, call: Call, *, reads_parameters: bool = True) -> None:
        self._reads = reads_parameters
        self._kept: dict[str, tuple[_Variable, Any, ObjectContents]] = {}
        """By name: a variable, its value, and what the value holds."""
        self._objects: dict[str, tuple[Mapping[str, Any], frozenset[str]]] = {}
        """By name, for an object whose attributes are variables: all attributes, and the names of those so far."""
        with suppress(Exception):  # objects of the program may do anything when they are looked at
            for variable in islice(_variables(call), _MAX_VARIABLES):
                with suppress(Exception):
                    self._keep(variable)

    def _keep(self, variable: _Variable, *, opens: bool = True) -> None:
        value = variable.read()
        if issubclass(type(value), (*_CODE, *_DESCRIPTORS)) or variable.name in self._kept:
            return
        attributes = _attributes(value) if opens else None
        contents = ObjectContents(None if attributes is not None else value, reads_parameters=self._reads)
        self._kept[variable.name] = variable, value, contents
        if attributes is not None:
            self._objects[variable.name] = attributes, frozenset(attributes)
            for key in list(attributes)[:_MAX_VARIABLES]:
                with suppress(Exception):
                    self._keep(_of_dict(f"{variable.name}.{key}", attributes, key), opens=False)

    def names(self, returned: Any) -> list[str]:
        """Return the names of the variables that have changed since, without those that ``returned`` holds."""
        with suppress(Exception):  # as above
            kept = ObjectContents(returned, reads_parameters=self._reads)
            own = {id(number) for _, _, contents in self._kept.values() for number in contents.numbers}
            names = [name for name, parts in self._changed() if not kept.has(parts, own)]
            roots = [name.partition(".")[0] for name in names]
            return sorted(names, key=lambda name: roots.index(name.partition(".")[0]))
        return []

    def _changed(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the name of each changed variable, and the parts that are new or have changed."""
        for name, (variable, before, contents) in self._kept.items():
            with suppress(Exception):
                value = variable.read()
                if parts := contents.changed() if is_same(value, before) else [value]:
                    yield name, parts
        for name, (attributes, before) in self._objects.items():
            for key in list(attributes):
                if key not in before and not _is_cached(self._kept[name][1], key):
                    yield f"{name}.{key}", [attributes[key]]


def _variables(call: Call) -> Iterator[_Variable]:
    """Yield the variables of the call that are not its function's own: arguments, globals, closures, attributes."""
    function, given = call.function, dict(call.provided)
    if isinstance(function, Script):  # its variables end with it in one process too
        return
    yield from _bound(function)
    hparams = given.pop("hparams", {})
    parameters = inspect.signature(function).parameters
    if isinstance(hparams, dict):
        for key in dict.keys(hparams):
            yield _of_dict(str(key) if key in parameters else f"hparams[{key!r}]", hparams, key)
        yield _Variable("hparams", lambda: tuple(dict.keys(hparams)))
    for name in ("module", "train_set", "test_set"):
        if name in given:
            yield _of_dict(name, given, name)
    for value in reachable_modules(function, *given.values(), *(hparams.values() if isinstance(hparams, dict) else ())):
        if isinstance(value, types.FunctionType) and not is_foreign(value):
            yield from _free_variables(value)
        elif isinstance(value, type) and is_own(value) and not issubclass(value, Enum):  # enums keep caches
            for name in vars(value):
                if not name.startswith("__"):
                    yield _of_dict(f"{value.__name__}.{name}", vars(value), name)


def _bound(function: Callable[..., Any]) -> Iterator[_Variable]:
    """Yield the object of a bound method, an object that is called, and the arguments of a partial."""
    while isinstance(function, functools.partial):
        names = list(inspect.signature(function.func).parameters)
        for name, value in (*zip(names, function.args, strict=False), *function.keywords.items()):
            yield _Variable(name, functools.partial(_identity, value))
        function = function.func
    method = function if isinstance(function, types.MethodType) else getattr(type(function), "__call__", None)  # noqa: B004
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)  # type: ignore[arg-type]
    if code is not None and code.co_varnames and not isinstance(owner, types.FunctionType):
        yield _Variable(code.co_varnames[0], lambda: owner)


def _identity(value: Any) -> Any:
    return value


def _free_variables(function: types.FunctionType) -> Iterator[_Variable]:
    """Yield the variables of closures, modules and functions' attributes that ``function`` names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _Variable(name, functools.partial(_content, cell))
    for name in vars(function):
        yield _of_dict(f"{function.__name__}.{name}", vars(function), name)
    names = {name for code in codes(function.__code__) for name in code.co_names}
    yield from _named(names, "", function.__globals__, set())


def _named(names: set[str], prefix: str, held: dict[str, Any], seen: set[int]) -> Iterator[_Variable]:
    for name in sorted(names.intersection(held)):
        value = held[name]
        if not isinstance(value, types.ModuleType):
            yield _of_dict(f"{prefix}{name}", held, name)
        elif id(value) not in seen and not is_installed(getattr(value, "__file__", None) or sys.prefix):
            yield from _named(names, f"{prefix}{name}.", vars(value), seen | {id(value)})


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return None


def _of_dict(name: str, held: Mapping[str, Any], key: str) -> _Variable:
    return _Variable(name, lambda: dict.get(held, key) if isinstance(held, dict) else held.get(key))


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a program's class, each of which is named by itself; None for others."""
    kind = type(value)
    if issubclass(kind, (*_CODE, dict, list, tuple, set, Dataset, nn.Module)) or not is_own(kind):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots
        return None
    return found if type(found) is dict else None


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)


# Note [Changed objects]
#
# Ranks get copies of the function and of all that it refers to. What the function returns comes back, and what it
# leaves in objects does not: the attributes of the object whose method it is, lists and models in closure variables and
# globals, arguments. In one process the caller would find it there. So rank 0 compares these objects before the call
# and after it, and the driver names those that have changed. It names no objects that the function has also returned.
#
# Objects that change by nature are not compared: loaders, optimizers and other objects of libraries, generators of
# random numbers, what a data set holds beside tensors and arrays, and whether a module is in training mode. A value is
# compared by identity, a builtin one by equality, a tensor or array by a checksum of up to a million of its elements.
# ``__eq__`` of no other class is asked. A part that cannot be looked at is left out: this never ends the run.
#
# The changed objects do not come back by themselves. That would cost each run that trains a model the time to send it,
# and what they refer to, such as a loader, an open file or a writer, often cannot be pickled.
