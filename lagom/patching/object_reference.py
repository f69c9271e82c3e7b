"""``ObjectReference``: what a ``WeakIdKeyDictionary`` of other objects than tensors holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class ObjectReference(weakref.ref[Any]):
    """A weak reference to any object, equal to others of the same one, whatever the object says that it equals.

    torch's own asks what it refers to for an attribute. A module that passes on the attributes that it lacks to another
    one (a proxy) cannot answer before it has that one.
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
