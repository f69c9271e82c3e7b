"""Answers of a service as JSON: plain values, objects of MLflow's own classes, and errors of MLflow and Python."""

from __future__ import annotations

import enum
import importlib
import json
from typing import Any


def encode(value: object) -> str:
    """Encode ``value`` as text.

    Raises:
        TypeError: when it holds an object that is neither plain (tuples and bytes are not) nor MLflow's, nor an
            exception of Python's.
    """
    return json.dumps(_encode(value), separators=(",", ":"))


def decode(text: str) -> Any:
    """Decode a text of ``encode``. Only objects of MLflow's classes and exceptions are made, without ``__init__``."""
    return json.loads(text, object_hook=_make)


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or (isinstance(value, (int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is dict:
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    encoded = {"module": kind.__module__, "name": kind.__name__}
    _class(**encoded)
    if isinstance(value, enum.Enum):
        return {**encoded, "member": value.name}
    args = list(value.args) if isinstance(value, Exception) else []
    items = list(value) if isinstance(value, list) else []
    return {**encoded, "args": _encode(args), "items": _encode(items), "state": _encode(vars(value))}


def _make(found: dict[str, Any]) -> Any:
    if "dict" in found:
        return dict(found["dict"])
    kind = _class(found["module"], found["name"])
    if "member" in found:
        return kind[found["member"]]
    made = kind.__new__(kind, *found["args"])
    if found["items"]:
        made.extend(found["items"])
    vars(made).update(found["state"])
    return made


def _class(module: str, name: str) -> Any:
    """Find one of MLflow's classes, or one of Python's exceptions."""
    package = module.partition(".")[0]
    found = vars(importlib.import_module(module)).get(name) if package in ("mlflow", "builtins") else None
    if isinstance(found, type) and found.__module__ == module and (package == "mlflow" or issubclass(found, Exception)):
        return found
    raise TypeError(f"{module}.{name} is neither a class of MLflow's nor an exception of Python's")
