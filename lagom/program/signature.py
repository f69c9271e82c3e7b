"""``Call``: the training function and its data; ``arguments`` matches these to the function's parameters by name."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lagom.config.torch_distributed import is_module
from lagom.settings import nearest

_FIELDS = ("module", "hparams", "train_set", "test_set", "dataset", "reporter")


def arguments(function: Callable[..., Any], provided: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments for ``function``, taken from ``provided`` by name.

    ``provided`` has the config's fields that are set, including ``hparams``. A parameter that is not in ``provided`` is
    looked up in ``hparams``, and ``**kwargs`` gets the rest of ``hparams``.

    Raises:
        ValueError: if ``function`` is no ordinary function (see ``_unusual``) or has no readable signature, or if a
            parameter without a default has no value; the text then has its name and the existing names.
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


def check_returned(function: Callable[..., Any], value: Any) -> None:
    """Check that ``function``, which has returned ``value``, has run: a coroutine or generator would run only later.

    Raises:
        ValueError: if ``value`` is a coroutine or a generator, which has trained nothing yet.
    """
    if inspect.iscoroutine(value):
        value.close()  # without this, Python also warns that the coroutine was never awaited
        what = "a coroutine, which only an event loop would run; want asyncio.run(...) around it"
    elif inspect.isgenerator(value) or inspect.isasyncgen(value):
        what = "a generator, which runs when it is read; want a value"
    else:
        return
    raise ValueError(f"{_name(function)} returned {what}")


def makes_data(value: Any) -> bool:
    """Return whether ``value``, given as a data set, is a class or callable with which ranks make the data set."""
    is_data = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
    return callable(value) and (isinstance(value, type) or not is_data)


def check_makers(provided: Mapping[str, Any]) -> None:
    """Check that functions which make data sets on the ranks need no arguments.

    Raises:
        ValueError: if a function needs arguments; the text has their names.
    """
    for setting in ("train_set", "test_set"):
        made: Any = provided.get(setting)
        if makes_data(made) and (needed := _needed(made)):
            name = getattr(made, "__name__", "the function")
            raise ValueError(
                f"{setting} is {name}, which ranks call without arguments to make the data set, and it needs "
                f"{', '.join(map(repr, needed))}; want a data set, or {setting}=lambda: {name}(...)"
            )


def _needed(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # the callable has no readable signature
        return []
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in starred]


def unread_hparams(function: Callable[..., Any], hparams: Mapping[str, Any]) -> list[str]:
    """Return a hint for each name in ``hparams`` that nothing reads, but that resembles an unset parameter."""
    parameters = _signature(function).parameters
    if "hparams" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return []
    left = tuple(name for name in parameters if name not in hparams and name not in _FIELDS)
    hints = {name: nearest(name, left, 0.8) for name in hparams if name not in parameters}
    return [f"nothing reads hparams[{name!r}]{hint}" for name, hint in hints.items() if hint]


def check_searched(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Check that ``function`` gets each of ``names``, the hyperparameters of a search.

    A function with the parameter ``hparams`` or ``**kwargs`` gets all of them.

    Raises:
        ValueError: if the function does not get a hyperparameter, so that its values would have no effect.
    """
    parameters = _signature(function).parameters
    if "hparams" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            hint = nearest(name, [each for each in parameters if each not in _FIELDS])
            raise ValueError(
                f"the search varies {name!r}, which {_name(function)} never gets{hint or '.'} Its parameters are "
                f"{', '.join(map(repr, parameters)) or 'none'}; give it a parameter {name!r}, or hparams"
            )


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of ``function``: for a partial, that of its function; for an object without a name, its class."""
    called = _called(function)
    return str(getattr(called, "__name__", type(called).__name__))


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if not callable(function):
        shown = reprlib.repr(function)
        raise ValueError(f"the first argument of lagom() is {shown}; want the training function itself, as in train")
    if what := _unusual(function):
        raise ValueError(f"{_name(function)} is {what}; want an ordinary function, which trains and returns a result")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{function!r} has no signature that could be read; wrap it in a def or lambda") from error


def _unusual(function: Callable[..., Any]) -> str:
    """Return the kind of a callable that does not train when it is called, for an error text; "" if it does."""
    if is_module(function):
        return "a module"
    called = [function, getattr(type(function), "__call__", None)]  # noqa: B004  (its code is examined)
    if any(map(inspect.iscoroutinefunction, called)):
        return "an async function, which only an event loop would run"
    if any(map(inspect.isgeneratorfunction, called)) or any(map(inspect.isasyncgenfunction, called)):
        return "a generator function (it has a yield), which runs nothing when it is called"
    return ""


def _name(function: Callable[..., Any]) -> str:
    called = _called(function)
    name = getattr(called, "__name__", None)
    return f"{name}()" if name else f"the {type(called).__name__}"


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return function


def _look_up(name: str, provided: Mapping[str, Any], hparams: Mapping[str, Any]) -> tuple[bool, Any]:
    for source in (provided, hparams):
        if name in source:
            return True, source[name]
    return False, None


def _missing(function: Callable[..., Any], name: str, provided: Mapping[str, Any], hparams: Mapping[str, Any]) -> str:
    there = ", ".join(key for key in _FIELDS if key in provided and key != "reporter")  # the reporter is lagom's
    keys = ", ".join(map(repr, hparams)) or "nothing"
    what = f"set {name}= in the config" if name in _FIELDS else f"put {name!r} into hparams"
    hint = nearest(name, (*_FIELDS, *hparams)) if name not in _FIELDS else ""
    return (
        f"{_name(function)} needs {name!r}, which nothing provides{hint or '.'} "
        f"The config has {there}; hparams has {keys}. Either {what}, or give the parameter a default"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function with its arguments, for one run; ``Plan`` holds the settings of the run."""

    function: Callable[..., Any]
    """The training function."""
    provided: Mapping[str, Any]
    """Arguments by name: the fields of the config that a function can ask for, ``hparams`` among them."""
    random_states: Mapping[str, Any] | None = None
    """States of the driver's generators, from which ranks start; None if the plan has a seed, or nothing is random."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the driver's process, from ``process_settings``; empty leaves the rank's process as it is."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Texts of the program's source files, by the file names in its code objects; empty without snapshots."""
