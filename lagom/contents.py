"""The parts of any value, to combine the ranks' results and to compare the results of rehearsals."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

Entries: TypeAlias = list[tuple[str, Any]]

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray)
_BY_NAME = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def entries(value: Any) -> Entries | None:
    """Return the parts of ``value``, each with its place as text; None if it has no parts.

    Keys of dicts and items of sets are sorted, so that equal values have their parts in one order. Tensors (except
    nested ones), arrays (except of objects), and values that cannot be examined have no parts.
    """
    if is_tensor(value) and value.is_nested:
        return list(_numbered(value.unbind()))
    if isinstance(value, (*_LEAVES, *_BY_NAME)) or is_tensor(value) or _is_scalar(value):
        return None
    if is_array(value):
        return list(_numbered(value.ravel().tolist())) if value.dtype.kind == "O" else None
    if isinstance(value, Mapping):
        return [(f"[{_text(key)}]", value[key]) for key in sorted(value, key=_text)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=False)]
    if isinstance(value, (list, tuple)):
        return list(_numbered(value))
    if isinstance(value, (set, frozenset)):
        return [("", item) for item in sorted(value, key=_text)]
    if dataclasses.is_dataclass(value):
        return [(f".{one.name}", getattr(value, one.name, None)) for one in dataclasses.fields(value)]
    return _look(_of_state, value) or _look(_of_frame, value) or _look(_of_array, value) or _look(_of_reduction, value)


def with_parts(value: Any, parts: Sequence[Any]) -> Any:
    """Return a copy of the plain container ``value`` that holds ``parts``, which are in the order of ``entries``."""
    if isinstance(value, tuple):
        make: Any = getattr(type(value), "_make", tuple)
        return make(parts)
    made = copy.copy(value)
    if isinstance(value, list):
        made[:] = parts
    elif isinstance(value, dict):
        for key, part in zip(sorted(value, key=_text), parts, strict=True):
            made[key] = part
    else:
        for field, part in zip(dataclasses.fields(value), parts, strict=True):
            object.__setattr__(made, field.name, part)  # the dataclass may be frozen
    return made


def is_plain(value: Any) -> bool:
    """Return whether ``value`` is a container that can be rebuilt with other numbers."""
    if isinstance(value, tuple):
        return type(value) is tuple or hasattr(value, "_fields")
    return isinstance(value, (dict, list)) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def is_metrics(value: Any) -> bool:
    """Return whether ``value`` holds nothing but numbers, texts, bytes, None, and plain containers of these."""
    left, met = [value], set()
    while left:
        one = left.pop()
        if is_plain(one):
            if id(one) not in met:
                met.add(id(one))
                left += [part for _, part in entries(one) or ()]
        elif not (isinstance(one, _LEAVES) or _is_scalar(one)):
            return False
    return True


def name_of(value: Any) -> str:
    """Return a name for a value that has no parts and is no number: its class's name, and its own if it has one."""
    kind = type(value)
    own = getattr(value, "__qualname__", getattr(value, "__name__", "")) if isinstance(value, _BY_NAME) else ""
    return f"{kind.__module__}.{kind.__qualname__} {own}".rstrip()


def is_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor of torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of numpy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _numbered(items: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    return ((f"[{number}]", item) for number, item in enumerate(items))


def _look(look: Callable[[Any], Entries | None], value: Any) -> Entries | None:
    try:
        return look(value)
    except Exception:  # a class of the program's may do anything
        return None


def _of_state(value: Any) -> Entries | None:
    """Return the entries of a module or an optimizer, by its ``state_dict``."""
    return entries(value.state_dict()) if callable(getattr(value, "state_dict", None)) else None


def _of_frame(value: Any) -> Entries | None:
    """Return the entries of a DataFrame, which may have several columns of one name."""
    if not (hasattr(value, "iloc") and hasattr(value, "columns")):
        return None
    return [(".index", value.index), (".columns", value.columns), *((f"[{_text(k)}]", v) for k, v in value.items())]


def _of_array(value: Any) -> Entries | None:
    """Return the entries of an object that numpy can read: a Series, an Index."""
    if not (hasattr(value, "__array__") and hasattr(value, "dtype")):
        return None
    import numpy

    around = [
        (f".{name}", getattr(value, name)) for name in ("name", "index") if not callable(getattr(value, name, len))
    ]
    return [(".dtype", str(value.dtype)), *around, ("", numpy.asarray(value))]


def _of_reduction(value: Any) -> Entries | None:
    """Return the entries of any other object, by the parts that pickle would store."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return [("", reduced)]
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # with slots
        state = {**(state[0] or {}), **state[1]}
    if isinstance(state, dict):
        held = [(f".{name}", item) for name, item in state.items()]
    else:
        held = [] if state is None else [("", state)]
    return [
        ("", make),
        ("", arguments),
        *held,
        *_numbered(items or ()),
        *((f"[{_text(k)}]", v) for k, v in pairs or ()),
    ]


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # a class of the program's may do anything in __repr__
        return f"<{type(value).__name__}>"
