"""``CallChanges``: names of the program's objects that a call changes on the ranks. See Note [Changed objects]."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import zlib
from collections import Counter, deque
from contextlib import suppress
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from lagom.forward.rows.restore import tensor_checksum
from lagom.forward.rows.surroundings import Surroundings
from lagom.inspection.reads import attributes, class_name, is_tensor, read_slot, slots
from lagom.inspection.state_parts import has_items
from lagom.program.script import Script
from lagom.program.sources import codes, is_foreign, is_installed, is_own, reachable_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from lagom.program.signature import Call

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
        for name, (own, before) in self._objects.items():
            for key in list(own):
                if key not in before and not _is_cached(self._kept[name][1], key):
                    yield f"{name}.{key}", [own[key]]


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
