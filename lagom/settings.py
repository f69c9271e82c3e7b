"""Settings: checks of their values, ``explain_fields`` for their meaning in ``help()``, and errors for a wrong name."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any, TypeVar

_Config = TypeVar("_Config")
_REMOVED = {
    "share_workers": "share_workers is now share_loading, which also divides loaders without workers",
    "sleeping_twins": "sleeping_twins is gone; use snapshot_every_s='auto', which also resumes a run in mid-epoch",
}
"""Fields that a config class had once, with the text that says what to use instead."""


def explain_fields(cls: type[_Config]) -> type[_Config]:
    """Add the meaning of all fields to the docstring of the frozen dataclass ``cls``, and make its errors say more."""
    initialise: Any = cls.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, *values: Any, **settings: Any) -> None:
        if values:
            first = next(iter(vars(cls).get("__annotations__") or _names(cls)))
            raise TypeError(f"{cls.__name__} takes its fields by name, as in {first}=..., not by position")
        for name in settings:
            _check_name(cls, name, TypeError)
        initialise(self, **settings)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        _check_name(cls, name, AttributeError)
        raise FrozenInstanceError(
            f"{cls.__name__} cannot be changed; make another: config = dataclasses.replace(config, {name}=...)"
        )

    def __getattr__(self: Any, name: str) -> Any:
        _check_name(cls, name, AttributeError)
        raise AttributeError(f"{cls.__name__}.{name} has no value yet")

    for function in (__init__, __setattr__, __getattr__):
        setattr(cls, function.__name__, function)
    listed = [line for group in _groups(cls) for line in ("", *_described(group))]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), *listed])
    return cls


def _groups(cls: type) -> Iterator[type]:
    """Yield the dataclasses that have fields of ``cls``: the class itself, its bases, then groups of settings."""
    if "__annotations__" in vars(cls):
        yield cls
    for base in cls.__bases__:
        if is_dataclass(base):
            yield from _groups(base)


def _described(group: type) -> Iterator[str]:
    """Yield lines with the meaning of the fields that ``group`` itself defines."""
    title = (getattr(group, "title", "") or "Fields") if "title" in vars(group) else "Fields"
    yield f"{title}:"
    for name, text in _own_texts(group).items():
        meaning = f"{name}: {' '.join(text.split())}"
        yield textwrap.fill(meaning, 116, initial_indent=" " * 4, subsequent_indent=" " * 8)


def field_texts(cls: type) -> dict[str, str]:
    """Return the docstring below each field in the source of ``cls`` and its bases; empty if the source is missing."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__bases__):
        texts |= field_texts(base) if is_dataclass(base) else {}
    return texts | _own_texts(cls)


def _own_texts(cls: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    with contextlib.suppress(OSError, TypeError):
        with open(sys.modules[cls.__module__].__file__ or "", encoding="utf-8") as file:
            tree = ast.parse(file.read())
        classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
        body = classes.get(cls.__name__, [])
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = str(text.value.value)
    return texts


def check_one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise a ValueError unless ``value`` is one of ``choices``; by type too: True == 1, and zero_lvl=True is wrong."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"{name} is {value!r}; want one of {', '.join(map(repr, choices))}")


def is_seconds(value: object) -> bool:
    """Return whether ``value`` is a finite number of seconds, more than 0."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < math.inf


def is_int(value: object) -> bool:
    """Return whether ``value`` is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def nearest(name: str, names: Sequence[str], similarity: float = 0.6) -> str:
    """Return the text ``; did you mean 'x'?`` if one of ``names`` is similar to ``name``, else ""."""
    import difflib

    found = difflib.get_close_matches(name, names, 1, similarity)
    return f"; did you mean {found[0]!r}?" if found else ""


def _names(cls: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(cls))


def _check_name(cls: type, name: str, kind: type[Exception]) -> None:
    if name not in _names(cls):
        if name in _REMOVED:
            raise kind(_REMOVED[name])
        more = nearest(name, _names(cls)) or f"; help({cls.__name__}) lists its fields"
        raise kind(f"{cls.__name__} has no field {name!r}{more}")
