"""``PassThrough``: stands in the place of a layer that is left out, and returns the layer's input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lagom.errors import AblationError
from lagom.random_states import random_states, set_random_states


class PassThrough(nn.Identity):
    """Returns its first argument; the first call checks that the layer returns a tensor of the same shape and kind.

    The layer is no submodule: its parameters are not trained, saved or counted. A program can still read the layer's
    attributes, such as ``model.blocks[0].in_features``, except tensors.

    Raises:
        AblationError: from the first call, if the layer does not return a tensor of its input's shape.
    """

    def __init__(self, name: str, layer: nn.Module, checked: bool = False) -> None:
        """Replace ``layer``, whose dotted name in the model is ``name``; with ``checked``, calls check nothing."""
        super().__init__()
        vars(self).update(_name=name, _layer=layer, _checked=checked)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the first argument."""
        passed = inputs[0] if inputs else next(iter(named.values()), None)
        if not self._checked:
            self._check(passed, inputs, named)
        return passed

    def _check(self, passed: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        before = random_states()
        layer = _twin(self._layer).train(self.training)
        if isinstance(passed, torch.Tensor):
            layer = layer.to(passed.device)
        try:
            with torch.no_grad():
                # Copies: a layer such as ReLU(inplace=True) would change the input.
                returned = layer(*_copied(inputs), **_copied(named))
        finally:
            set_random_states(before)
        if not _fits(passed, returned):
            raise AblationError(
                f"{self._name} ({type(layer).__name__}) cannot be left out as it is: it makes {_shown(returned)} from "
                f"{_shown(passed)}, so its input cannot pass through. Say what stands in its place: "
                f"layers.include({self._name!r}, replacement=...), a function that gets the layer and returns a module"
            )
        vars(self).update(_layer=layer.to("meta"), _checked=True)

    def _apply(self, fn: Any, recurse: bool = True) -> PassThrough:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self._checked:
            self._layer._apply(fn)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        found = getattr(self._layer, name)
        if isinstance(found, torch.Tensor):
            raise AttributeError(f"{self._name} is left out of this trial, and so is its {name}")
        return PassThrough(f"{self._name}.{name}", found, self._checked) if isinstance(found, nn.Module) else found


def _twin(layer: nn.Module) -> nn.Module:
    """Return a layer with the parameters of ``layer``, and copies of its buffers, such as BatchNorm's statistics.

    The model may have ``layer`` in another place too, so ``layer`` itself must stay as it is. ``copy.deepcopy`` would
    copy the parameters, and fails for layers with parametrizations.
    """
    twin: nn.Module = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    vars(twin)["_parameters"] = dict(layer._parameters)
    vars(twin)["_buffers"] = {name: _copied(one) for name, one in layer._buffers.items()}
    vars(twin)["_modules"] = {name: _twin(part) if part is not None else None for name, part in layer._modules.items()}
    return twin


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    return {name: _copied(one) for name, one in value.items()} if type(value) is dict else value


def _fits(passed: Any, returned: Any) -> bool:
    if not isinstance(passed, torch.Tensor) or not isinstance(returned, torch.Tensor):
        return False
    # Under autocast a layer returns another floating type than it gets.
    same_type = passed.dtype == returned.dtype or (passed.is_floating_point() and returned.is_floating_point())
    return same_type and passed.shape == returned.shape


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = "" if value.is_floating_point() else f" of {str(value.dtype).removeprefix('torch.')}"
        return f"a tensor{kind} of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(map(_shown, value))}"
    return f"a {type(value).__name__}"
