"""Leave layers out of the models that a program makes from the config's ``module``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from lagom.errors import AblationError
from lagom.extensions.search.on_rank.layer_names import check_layer
from lagom.extensions.search.on_rank.pass_through import PassThrough
from lagom.patching.replace import replaced
from lagom.random_states import random_states, set_random_states

Replacement = Callable[[nn.Module], Any] | None


def leave_out(model: nn.Module, layers: Sequence[str], replacement: Replacement) -> None:
    """Replace ``layers``, given by their dotted names, in ``model``.

    The random generators keep the states that they have after the construction of the whole model, so that a variant
    sees the batches in the base's order.

    Args:
        replacement: returns the module that replaces a layer, given that layer. None: the layer's input passes through.

    Raises:
        ValueError: for a name that the model does not have, or a replacement that is no module.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in layers:
        check_layer(name, names, type(model).__name__)
    before = random_states()
    for name in layers:
        parent, _, last = name.rpartition(".")
        layer = model.get_submodule(name)
        substitute = _left(name, layer) if replacement is None else replacement(layer)
        if not isinstance(substitute, nn.Module):
            raise ValueError(f"the replacement for {name} is a {type(substitute).__name__}; want a torch.nn.Module")
        setattr(model.get_submodule(parent), last, substitute.train(layer.training))
    set_random_states(before)


def _left(name: str, layer: nn.Module) -> nn.Module:
    """Return the default replacement of ``layer``: an empty container for a container, else a ``PassThrough``."""
    for kind in (nn.ModuleList, nn.ModuleDict):
        if isinstance(layer, kind):
            return kind()
    return PassThrough(name, layer)


def without_layers(
    function: Callable[..., Any], module: Any, layers: Sequence[str], replacement: Replacement
) -> tuple[Callable[..., Any], Any]:
    """Return ``function`` and ``module``, so changed that ``function`` makes models of ``module`` without ``layers``.

    A class stays the same object, with another ``__init__`` while the function runs, since the program may use its
    name, or ``isinstance(model, module)``. A factory is wrapped in another function.

    Args:
        module: a class, a factory, or a list of these; then layers are named as in an ``nn.ModuleList``: "0.fc".

    Raises:
        ValueError: for a name that fits no module of a list; from the function, as ``leave_out``.
        AblationError: from the function, if it has not made a model from the module.
    """
    if not isinstance(module, (list, tuple)):
        return _without(function, module, layers, replacement)
    parts = list(module)
    own: dict[int, list[str]] = {}
    for name in layers:
        place, _, inner = name.partition(".")
        if not place.isdecimal() or int(place) >= len(parts) or not inner:
            raise ValueError(f"there is no layer {name!r}: module is a list of {len(parts)}, whose layers are '0.NAME'")
        own.setdefault(int(place), []).append(inner)
    for number, names in own.items():
        function, parts[number] = _without(function, parts[number], names, replacement)
    return function, parts


def _without(
    function: Callable[..., Any], module: Any, layers: Sequence[str], replacement: Replacement
) -> tuple[Callable[..., Any], Any]:
    num_made = 0

    def shorten(model: Any) -> None:
        nonlocal num_made
        if not isinstance(model, nn.Module):
            raise ValueError(f"{_name(module)} gives a {type(model).__name__}; want a torch.nn.Module")
        num_made += 1
        leave_out(model, layers, replacement)

    @functools.wraps(function)
    def changed(*args: Any, **named: Any) -> Any:
        with _shortened(module, shorten) if isinstance(module, type) else nullcontext():
            returned = function(*args, **named)
        if not num_made:
            raise AblationError(
                f"{', '.join(layers)} cannot be left out: the function has not made a model of {_name(module)}, the "
                "config's module, by itself; a subclass does not count"
            )
        return returned

    if isinstance(module, type):
        return changed, module

    def make(*args: Any, **named: Any) -> Any:
        model = module(*args, **named)
        shorten(model)
        return model

    return changed, functools.update_wrapper(make, module)


@contextmanager
def _shortened(kind: Any, shorten: Callable[[Any], None]) -> Iterator[None]:
    """Call ``shorten`` with each model of the class ``kind`` at the end of its construction."""
    construct: Any = kind.__init__
    depth = 0

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        nonlocal depth
        depth += 1
        try:
            construct(self, *args, **named)
        finally:
            depth -= 1
        # Not for a subclass, whose construction goes on, nor for a model inside another model of the same class.
        if type(self) is kind and not depth:
            shorten(self)

    with replaced(kind, "__init__", __init__):
        yield


def _name(module: Any) -> str:
    return getattr(module, "__name__", type(module).__name__)
