"""``replaced``: the only way in which lagom replaces functions and methods of torch."""

from __future__ import annotations

import ctypes
import gc
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOTHING = object()
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, a flag of types that are made at run time: all classes in Python."""
_active: dict[int, tuple[object, str, object]] = {}
"""Owner, name and earlier value of each replaced attribute, in the order of replacement.

The earlier value is ``_NOTHING`` if the owner itself did not have the attribute, such as a class that inherits it.
"""


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Context manager that sets ``owner.name`` to ``value`` and restores it; an inherited name is inherited again."""
    # Read the value from the dict, which has the staticmethod or property itself, not the result of attribute access.
    before = vars(owner).get(name, _NOTHING)
    entry = owner, name, before
    _active[id(entry)] = entry
    _set(owner, name, value)
    try:
        yield
    finally:
        del _active[id(entry)]
        _put_back(owner, name, before)


@contextmanager
def originals(package: str) -> Iterator[None]:
    """Context manager in which the replaced public functions of modules of ``package`` have their original values.

    Methods and private functions, such as those of loaders and backward, stay replaced: other threads may call them
    meanwhile.
    """
    with ExitStack() as stack:
        for owner, name, before in reversed(list(_active.values())):
            if isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == package and name[0] != "_":
                stack.callback(setattr, owner, name, vars(owner)[name])
                _put_back(owner, name, before)
        yield


def replaced_at(value: object) -> tuple[object, str] | None:
    """Return the owner and the name of the attribute that ``value`` replaces now; None if it replaces none."""
    for owner, name, _ in list(_active.values()):
        if vars(owner).get(name) is value:
            return owner, name
    return None


def _put_back(owner: object, name: str, before: object) -> None:
    if before is _NOTHING:
        delattr(owner, name)
    else:
        _set(owner, name, before)


def _set(owner: object, name: str, value: object) -> None:
    if not isinstance(owner, type) or owner.__flags__ & _HEAP_TYPE:
        setattr(owner, name, value)
        return
    # Python refuses to set an attribute of a type written in C, such as torch.Generator, whose own dict takes it.
    (attributes,) = gc.get_referents(owner.__dict__)
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
