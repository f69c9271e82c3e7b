"""``find_unpicklable``: names the part of a value that cannot be pickled, as the user knows it."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from lagom.program.pickler import is_sparks

DRIVERS_OWN = " of Spark's, which only the driver has)"
"""End of the text that names an object of PySpark, by which the caller adds a remedy to the error."""


def find_unpicklable(
    value: object, can_pickle: Callable[[object], bool], name: str = "", seen: frozenset[int] = frozenset()
) -> str:
    """Name the innermost part of ``value`` that cannot be pickled; return "" if there is none, or it has no name.

    Args:
        name: name of ``value`` for the user; "" for a value without a name.
        seen: ids of the values around ``value``.
    """
    if can_pickle(value):
        return ""
    if is_sparks(value):
        return f"{name} (a {type(value).__name__}{DRIVERS_OWN}"
    for part_name, part in _parts(value, name):
        if id(part) not in seen and (found := find_unpicklable(part, can_pickle, part_name, seen | {id(value)})):
            return found
    return f"{name} (a {type(value).__name__})" if name else ""


def _parts(value: object, name: str) -> list[tuple[str, object]]:
    """Return named parts one level down: items of containers, closure and globals of functions, attributes."""
    if isinstance(value, Mapping):
        # A key of ``Call.provided`` is the name of an argument, so it is shown alone and not as ``provided['x']``.
        named = name not in ("", "provided")
        return [(_inside(name, f"[{key!r}]") if named else str(key), part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(_inside(name, f"[{position}]"), part) for position, part in enumerate(value)]
    if code := getattr(value, "__code__", None):
        cells = zip(code.co_freevars, getattr(value, "__closure__", None) or (), strict=False)
        used = {key: part for key, part in value.__globals__.items() if key in code.co_names}  # type: ignore[attr-defined]
        inner = {key: cell.cell_contents for key, cell in cells} | used
        if isinstance(value, types.MethodType):
            inner[code.co_varnames[0]] = value.__self__
        return [(f"the variable {key!r} that {code.co_name}() uses", part) for key, part in inner.items()]
    if isinstance(value, functools.partial):
        return [(name, value.func), *((_inside(name, f"({part_name})"), part) for part_name, part in _given(value))]
    return [(_inside(name, f".{key}") if name else key, part) for key, part in _attributes(value).items()]


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes of an instance; a dataclass with slots has no ``__dict__``."""
    if isinstance(value, type):
        return {}
    slots = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})


def _given(call: functools.partial[Any]) -> list[tuple[str, object]]:
    return [*((str(position), part) for position, part in enumerate(call.args)), *call.keywords.items()]


def _inside(name: str, part: str) -> str:
    """Return the name of a ``part`` of the value called ``name``, which may be a variable in quotes."""
    found = re.fullmatch(r"the variable '(.*)' that (.*) uses", name)
    return f"the variable '{found[1]}{part}' that {found[2]} uses" if found else name + part
