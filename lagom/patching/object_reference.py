"""``ObjectReference``: keys of a ``WeakIdKeyDictionary`` of objects that are no tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class ObjectReference(weakref.ref[Any]):
    """A weak reference to any object, equal to other references to the same object, whatever its ``__eq__`` says.

    torch's own reference reads an attribute of the object. A module that passes unknown attributes on to another one (a
    proxy) cannot answer before it has that module.
    """

    __slots__ = ("_id",)

    def __init__(self, key: object, callback: Callable[[Any], object] | None = None) -> None:
        super().__init__(key, callback)  # type: ignore[call-arg]  # the stubs have only __new__ take it
        self._id = id(key)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self()
        return mine is not None and isinstance(other, ObjectReference) and mine is other()
