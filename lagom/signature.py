"""Which of the things a config provides the training function asks for, by the names in its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_FIELDS = ("module", "hparams", "train_set", "test_set", "dataset", "reporter")


def arguments(function: Callable[..., Any], provided: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments for ``function``, taken from ``provided`` by name.

    ``provided`` holds the config's fields that are set, ``hparams`` among them; any other parameter is looked up in
    ``hparams``, and ``**kwargs`` gets what is left there.

    Raises:
        ValueError: when a parameter without default is not to be had, naming it and what is there.
    """
    signature = _signature(function)
    hparams = dict(provided.get("hparams", {}))
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update({key: value for key, value in hparams.items() if key not in signature.parameters})
            continue
        found, value = _look_up(parameter.name, provided, hparams)
        if not found and parameter.default is parameter.empty:
            raise ValueError(_missing(function, parameter.name, provided, hparams))
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(value if found else parameter.default)
        elif found:
            named[parameter.name] = value
    return positional, named


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if not callable(function):
        raise ValueError(f"the first argument of lagom() is {function!r}; want the training function itself")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{function!r} has no signature that could be read; wrap it in a def or lambda") from error


def _look_up(name: str, provided: Mapping[str, Any], hparams: Mapping[str, Any]) -> tuple[bool, Any]:
    for source in (provided, hparams):
        if name in source:
            return True, source[name]
    return False, None


def _missing(function: Callable[..., Any], name: str, provided: Mapping[str, Any], hparams: Mapping[str, Any]) -> str:
    there = ", ".join(key for key in _FIELDS if key in provided)
    keys = ", ".join(map(repr, hparams)) or "nothing"
    what = f"set {name}= in the config" if name in _FIELDS else f"put {name!r} into hparams"
    return (
        f"{getattr(function, '__name__', function)}() needs {name!r}, which nothing provides: "
        f"the config has {there}; hparams has {keys}. Either {what}, or give the parameter a default"
    )
