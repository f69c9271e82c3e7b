"""What MLflow's stores answer, as JSON and back: plain values, and objects of MLflow's own classes."""

from __future__ import annotations

import base64
import builtins
import enum
import importlib
import json
import sys
from typing import Any

_PACKAGE = "mlflow"
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encoded(value: Any) -> str:
    """``value`` as text.

    Raises:
        TypeError: when there is an object in it that is neither plain nor MLflow's.
    """
    return json.dumps(_encoded(value), separators=(",", ":"))


def decoded(text: str) -> Any:
    """The value that ``encoded`` has made ``text`` of; only classes of MLflow's are made, and their code is not run."""
    return _decoded(json.loads(text))


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return {"enum": _name(kind), "name": value.name}
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        return {kind.__name__: [_encoded(item) for item in value]}
    if kind is dict:
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, BaseException) and kind.__module__ == "builtins":
        return {"error": kind.__name__, "args": _encoded(list(map(str, value.args)))}
    if isinstance(value, (int, float, str)):  # as protobuf's enums, which are integers
        return next(plain(value) for plain in (int, float, str) if isinstance(value, plain))
    found: dict[str, Any] = {"class": _name(kind), "state": _encoded(_state(value))}
    if isinstance(value, BaseException):
        found["args"] = _encoded(list(value.args))
    if isinstance(value, list):
        found["items"] = [_encoded(item) for item in value]
    return found


def _state(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name) and not name.startswith("__")}
    return {**state, **getattr(value, "__dict__", {})}


def _name(kind: type) -> list[str]:
    if kind.__module__.partition(".")[0] != _PACKAGE:
        raise TypeError(f"an object of {kind.__module__}.{kind.__qualname__}")
    return [kind.__module__, kind.__qualname__]


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for name, sequence in _SEQUENCES.items():
        if name in value:
            return sequence(_decoded(item) for item in value[name])
    if "dict" in value:
        return {_decoded(key): _decoded(item) for key, item in value["dict"]}
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    if "enum" in value:
        return _class(value["enum"])[value["name"]]
    if "error" in value:
        error: Any = getattr(builtins, value["error"], None)
        known = isinstance(error, type) and issubclass(error, Exception)
        return (error if known else RuntimeError)(*_decoded(value["args"]))
    kind = _class(value["class"])
    made = kind.__new__(kind, *_decoded(value["args"])) if "args" in value else kind.__new__(kind)
    if "items" in value:
        made.extend(_decoded(item) for item in value["items"])
    for key, item in _decoded(value["state"]).items():
        object.__setattr__(made, key, item)
    return made


def _class(name: list[str]) -> Any:
    module, qualname = name
    if module.partition(".")[0] != _PACKAGE:
        raise TypeError(f"a class of {module}")
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in qualname.split("."):
        found = vars(found)[part]
    if not isinstance(found, type) or found.__module__ != module:
        raise TypeError(f"{module}.{qualname} is no class of MLflow's")
    return found
