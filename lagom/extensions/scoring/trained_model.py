"""``trained_model``: finds the model in what a training function returned, and builds it from a ``state_dict``."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lagom.errors import DataError
from lagom.random_states import random_states, set_random_states
from lagom.result import Result, short

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile give the names of a model's parameters."""


def trained_model(model: Any, module: Callable[..., Any] | None, entry: str | int | None) -> Any:
    """Return a copy of a trained model on the CPU, in evaluation mode.

    Args:
        model: a torch module, a ``state_dict``, the path of a file that ``torch.save`` wrote, a dict or tuple with one
            of these, or the ``Result`` of a run that returned one.
        module: makes the module for a ``state_dict``; None: the module of the run's config.
        entry: key of the model in a dict or tuple; None if there is only one.

    Raises:
        ValueError: if there is no model, or several, or the ``state_dict`` does not fit ``module``.
        DataError: if a file cannot be read.
    """
    import torch

    configured = model.module if isinstance(model, Result) else None
    trained = _found(model.value if isinstance(model, Result) else model, entry)
    if isinstance(trained, (str, os.PathLike)):
        trained = _found(_loaded(trained), entry)
    if isinstance(trained, torch.nn.Module):
        trained = copy.deepcopy(_unwrapped(trained))
    else:
        trained = _built(trained, module, configured)
    return trained.cpu().eval()


def _found(value: Any, entry: str | int | None) -> Any:
    """Return the module, ``state_dict`` or path in ``value``."""
    if entry is None and _kind(value):
        return value
    parts = dict(_parts(value))
    if entry is not None:
        if entry not in parts:
            raise ValueError(f"there is no {entry!r} in what was returned: {_told(value)}")
        if not _kind(parts[entry]):
            raise ValueError(f"{entry!r} is no model, but {short(parts[entry])}; {_WANTED}")
        return parts[entry]
    for kind in ("module", "state_dict", "path"):
        names = [name for name, part in parts.items() if _kind(part) == kind]
        if len(names) > 1:
            raise ValueError(
                f"there are several models: {', '.join(map(repr, names))}; choose one by entry={names[0]!r}"
            )
        if names:
            return parts[names[0]]
    raise ValueError(f"there is no model in what was returned: {_told(value)}. {_WANTED}")


_WANTED = (
    "A model is a torch module, its state_dict() or the path of a file that torch.save wrote: have the training "
    "function return one, alone or in a dict, or make lagom.Predictor(model)"
)


def _kind(value: Any) -> str:
    """Return "module", "state_dict" or "path"; "" for other values."""
    import torch

    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return "state_dict" if all(isinstance(part, torch.Tensor) for part in value.values()) else ""
    is_path = isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith((".pt", ".pth", ".bin")))
    return "path" if is_path or (isinstance(value, str) and os.path.isfile(value)) else ""


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def _told(value: Any) -> str:
    parts = [f"{name!r}, a {type(part).__name__}" for name, part in _parts(value)]
    return "; ".join(parts) if parts else short(value)


def _loaded(path: str | os.PathLike[str]) -> Any:
    import torch

    if not os.path.isfile(path):
        raise DataError(f"there is no file {os.fspath(path)}, which the training function returned or which was given")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{os.fspath(path)} cannot be read as weights: {str(error).splitlines()[0]} If you trust the file, load it "
            f"yourself: lagom.Predictor(torch.load({os.fspath(path)!r}, weights_only=False))"
        ) from error


def _unwrapped(model: Any) -> Any:
    """Return the program's module without the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            model = model.module
        else:
            return model


def _built(state: Mapping[str, Any], module: Callable[..., Any] | None, configured: Any) -> Any:
    """Return the module that ``module`` makes, or the config's, with the parameters of ``state``."""
    import torch

    if module is None:
        module = _configured(configured)
    before = random_states()  # a new module draws its parameters
    try:
        built = module()
    except TypeError as error:
        raise ValueError(f"module= is called without arguments, and fails: {error}; {_HOW}") from error
    finally:
        set_random_states(before)
    if not isinstance(built, torch.nn.Module):
        raise ValueError(f"module= returned a {type(built).__name__}, not a torch module")
    state = dict(state)
    for prefix in _WRAPPERS:
        torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, prefix)
    try:
        built.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"the state_dict does not fit the module that module= makes: {error}") from error
    return built


_HOW = "make the module as the training function did, such as module=lambda: Net(num_classes=10)"


def _configured(module: Any) -> Callable[..., Any]:
    if module is None:
        raise ValueError(f"the model is a state_dict, which needs its module: give module=; {_HOW}")
    name = getattr(module, "__name__", repr(module))
    if isinstance(module, (list, tuple)):
        raise ValueError(f"the run's config has a list of modules; say which one by module=; {_HOW}")
    try:
        parameters = inspect.signature(module).parameters
    except (TypeError, ValueError):  # a callable of C
        parameters = {}  # type: ignore[assignment]
    # With other arguments, the parameters might fit and mean something else.
    if parameters:
        raise ValueError(
            f"{name} of the run's config takes {', '.join(parameters)}, which only the training function knew; {_HOW}"
        )
    return module  # type: ignore[no-any-return]
