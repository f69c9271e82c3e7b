"""``attributes``, ``slots``, ``class_attributes``: read an object without running code of its class.

See Note [Looks at objects].
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_class_dict: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
_class_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
_class_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_class_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_PLAIN_IDS = frozenset(map(id, (bool, int, float, complex, str, bytes, type(None))))


def attributes(value: Any) -> dict[str, Any] | None:
    """Return the dict of the attributes of ``value`` itself; None if it has none."""
    if issubclass(type(value), threading.local):
        variables = threading.local.__getattribute__(value, "__dict__")
        return variables if issubclass(type(variables), dict) else None
    for kind in _class_mro(type(value)):
        slot = _class_dict(kind).get("__dict__")
        if slot is not None:
            is_real = type(slot) in (types.GetSetDescriptorType, types.MemberDescriptorType)
            variables = slot.__get__(value) if is_real else None
            return variables if issubclass(type(variables), dict) else None
    return None


def slots(value: Any) -> list[Any]:
    """Return the descriptors of the slots of ``value`` that Python code has declared."""
    return [
        member
        for kind in _class_mro(type(value))
        if "__slots__" in _class_dict(kind)
        for member in _class_dict(kind).values()
        if type(member) is types.MemberDescriptorType
    ]


def read_slot(value: Any, member: Any, default: Any = None) -> Any:
    """Return the content of a slot, or ``default`` if it is empty."""
    try:
        return member.__get__(value)
    except AttributeError:
        return default


def read_attribute(value: Any, name: str) -> Any:
    """Return an attribute that ``value`` or its class has; None if it is missing, would be made, or raises an error."""
    held = attributes(value)
    if held is not None and dict.__contains__(held, name):
        return dict.__getitem__(held, name)
    if not any(name in _class_dict(kind) for kind in _class_mro(type(value))):
        return None
    try:
        return getattr(value, name)
    except Exception:  # a property of the program's may do anything
        return None


def mapped_values(value: Any) -> Iterable[Any]:
    """Return the values of a mapping; none of another object, or if they cannot be read."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict.values(value)
    try:
        return list(value.values()) if issubclass(kind, Mapping) else ()
    except Exception:  # a mapping or a metaclass of the program's may do anything
        return ()


def class_attributes(kind: type) -> Mapping[str, Any]:
    """Return the attributes that a class itself has."""
    return _class_dict(kind)


def bases(kind: type) -> tuple[type, ...]:
    """Return a class with its base classes, in the order in which Python looks for an attribute."""
    return _class_mro(kind)


def module_of(kind: type) -> Any:
    """Return the ``__module__`` of a class."""
    return _class_dict(kind).get("__module__") or _class_module(kind)


def class_path(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{module_of(kind)}.{_class_qualname(kind)}"


def class_name(value: Any) -> str:
    """Return the name of the class of ``value``."""
    return _class_name(type(value))


def referents(value: Any) -> list[Any]:
    """Return the objects that ``value`` refers to, as Python's garbage collector sees them."""
    return gc.get_referents(value)


def is_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor by its class; ``isinstance`` would ask the object, too."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor)


def is_plain(value: Any) -> bool:
    """Return whether ``value`` is a bool, a number, a text, bytes or None, and not of a subclass."""
    return id(type(value)) in _PLAIN_IDS  # by id: a metaclass may refuse to hash its classes


def class_key(kind: type) -> object:
    """Return ``kind``, or its name if its metaclass compares or hashes classes in a way of its own."""
    meta = type(kind)
    if meta is type:
        return kind
    known = _metaclasses.get(id(meta))
    if known is None:
        own = [one for one in _class_mro(meta) if one is not type and one is not object]
        compares = any(name in _class_dict(one) for one in own for name in ("__eq__", "__hash__"))
        known = _metaclasses[id(meta)] = meta, compares
    return class_path(kind) if known[1] else kind


_metaclasses: dict[int, tuple[type, bool]] = {}
"""Known metaclasses by id, and whether they compare or hash classes in a way of their own."""


def describe(error: BaseException) -> str:
    """Return the type of ``error`` with its text, if the error can give one."""
    try:
        return f"{type(error).__name__}: {str(error)[:200]}"
    except Exception:  # an error of the program's may do anything in __str__
        return type(error).__name__


# Note [Looks at objects]
#
# lagom reads objects of the program that the program has not handed to it: what a forward can reach, and what a probe
# must restore. Such a look must neither change an object nor fail. So it calls no method of the object, of its class or
# of its metaclass: ``len()``, ``iter()``, ``==``, ``isinstance()`` and an attribute may all run code of the program's,
# which may raise, load something, or count its calls. Items, attributes and slots are read and written by the methods
# of Python's own classes (``dict.items(config)``), also where a subclass refuses to be written. Contents are compared
# by identity. Only of a part of a batch a mapping is asked for its values, and an object for its shape; they may fail.
#
# A copy that differs from what is read at once afterwards proves nothing, and is a ``RestoreError`` before anything has
# run. What C code keeps to itself is not seen.
