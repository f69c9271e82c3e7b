"""``explain_fields``: shows the meaning of a config's fields in ``help()``, and explains a wrong name in one line."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any, TypeVar

_Config = TypeVar("_Config")
_REMOVED = {
    "sleeping_twins": "sleeping_twins is gone; use snapshot_every_s='auto', which also resumes a run in mid-epoch",
}
"""Fields that a config class had once, with the text that says what to use instead."""


def explain_fields(cls: type[_Config]) -> type[_Config]:
    """Add the meaning of all fields to the docstring of the frozen dataclass ``cls``, and make its errors say more."""
    initialise: Any = cls.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, *values: Any, **settings: Any) -> None:
        if values:
            raise TypeError(f"{cls.__name__} takes its fields by name, as in {_names(cls)[0]}=..., not by position")
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
    meanings = [f"{name}: {' '.join(text.split())}" for name, text in field_texts(cls).items()]
    listed = [textwrap.fill(text, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in meanings]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Fields:", *listed])
    return cls


def field_texts(cls: type) -> dict[str, str]:
    """Return the docstring below each field in the source of ``cls`` and its bases; empty if the source is missing."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__bases__):
        texts |= field_texts(base) if is_dataclass(base) else {}
    with contextlib.suppress(OSError, TypeError):
        with open(sys.modules[cls.__module__].__file__ or "", encoding="utf-8") as file:
            tree = ast.parse(file.read())
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = str(text.value.value)
    return texts


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
