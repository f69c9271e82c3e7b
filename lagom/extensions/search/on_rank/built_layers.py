"""``layer_names``: the names of a model's layers, found by building it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lagom.random_states import random_states, set_random_states


def layer_names(module: Any, hparams: Mapping[str, Any]) -> list[str] | None:
    """Return the dotted names of all layers of the model that ``module`` makes; None if it cannot be built here.

    The model is built on the meta device if it can be, else with its values. The random states are restored.

    Args:
        module: a class, a factory, or a list of these, whose layers then begin with "0.", "1.", ...
        hparams: arguments for constructors that name them.
    """
    if not isinstance(module, (list, tuple)):
        model = _built(module, hparams)
        return None if model is None else _names(model)
    models = [_built(one, hparams) for one in module]
    if None in models:
        return None
    return [f"{number}.{name}" for number, model in enumerate(models) if model is not None for name in _names(model)]


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name]


def _built(module: Callable[..., Any], hparams: Mapping[str, Any]) -> nn.Module | None:
    try:
        asked = inspect.signature(module).parameters
    except (TypeError, ValueError):
        asked = {}  # type: ignore[assignment]
    given = {name: hparams[name] for name in asked if name in hparams}
    before = random_states()
    try:
        for device in (torch.device("meta"), contextlib.nullcontext()):
            # Anything may be raised: by arguments that are missing, or by values that the meta device does not have.
            with contextlib.suppress(Exception), device:
                model = module(**given)
                if isinstance(model, nn.Module):
                    return model
    finally:
        set_random_states(before)
    return None
