"""Weak references of lagom's own to objects of the program, which ``torch.utils.swap_tensors`` does not see."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.utils
from torch.utils.weak import WeakIdKeyDictionary

from lagom.patching.replace import replaced

_T = TypeVar("_T")


class HiddenReference(weakref.ref[_T]):
    """A weak reference to a tensor of the program. See Note [Swapped tensors]."""

    __slots__ = ()


class ObjectReference(HiddenReference[Any]):
    """A weak reference to any object, equal only to references to the same object, without a call of its ``__eq__``.

    It is the type of keys of a ``WeakIdKeyDictionary``. torch's own reference reads an attribute of the object. This
    fails for a proxy, a module that forwards unknown attributes to another module, while the proxy does not have the
    other module yet.
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


class TensorReference(ObjectReference):
    """An ``ObjectReference`` to a tensor, or to an object that may be a tensor."""

    __slots__ = ()

    def __call__(self) -> Any:
        """Return the object, or None if it is dead."""
        found: Any = super().__call__()
        if issubclass(type(found), torch.Tensor):
            found._fix_weakref()  # see torch.utils.weak.TensorWeakRef
        return found


def tensor_dictionary() -> WeakIdKeyDictionary:
    """Return an empty dictionary with weak keys that may be tensors."""
    return WeakIdKeyDictionary(ref_type=TensorReference)


@contextmanager
def swappable_tensors() -> Iterator[None]:
    """Let ``torch.utils.swap_tensors`` swap tensors to which only lagom has weak references."""

    def getweakrefs(tensor: Any) -> list[Any]:
        return [ref for ref in weakref.getweakrefs(tensor) if not isinstance(ref, HiddenReference)]

    with replaced(torch.utils, "weakref", SimpleNamespace(**vars(weakref) | {"getweakrefs": getweakrefs})):
        yield


# Note [Swapped tensors]
#
# `torch.utils.swap_tensors` exchanges the contents of two tensor objects, and so do `load_state_dict` and
# `Module.to(dtype)` under `torch.__future__.set_swap_module_params_on_conversion(True)`. It refuses tensors that have
# weak references, since these would find the other content afterwards. lagom has weak references to parameters, buffers
# and tensors of batches, and each means the object of the program, whatever it contains: a parameter of a module is the
# same leaf with new values, as after an assignment to `.data`. So lagom's references are of a class of their own, and
# `swap_tensors` sees only the others. A dictionary whose keys may be tensors is a `tensor_dictionary`, and every other
# weak reference to a tensor is a `HiddenReference`.
