"""``ObjectReference``: the type of keys of a ``WeakIdKeyDictionary`` whose objects are not tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class ObjectReference(weakref.ref[Any]):
    """A weak reference to any object, equal only to references to the same object, without a call of its ``__eq__``.

    torch's own reference reads an attribute of the object. This fails for a proxy, a module that forwards unknown
    attributes to another module, while the proxy does not have the other module yet.
    """

    __slots__ = ("_id",)

    def __init__(self, key: object, callback: Callable[[Any], object] | None = None) -> None:
        super().__init__(key, callback)  # type: ignore[call-arg]  # in the stubs only ``__new__`` has ``callback``
        self._id = id(key)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self()
        return mine is not None and isinstance(other, ObjectReference) and mine is other()
