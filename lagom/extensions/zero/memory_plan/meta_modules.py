"""Modules without values: built on the meta device, or copied with tensors that take no memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Callable


def build_module(module: nn.Module | Callable[[], Any]) -> nn.Module:
    """Return ``module``, or build it from a class or factory on the meta device, without memory or random numbers.

    Raises:
        ValueError: if the class or factory fails on the meta device or returns no module, or if a lazy parameter has no
            shape yet.
    """
    built: Any = module
    if not isinstance(module, nn.Module):
        name = getattr(module, "__name__", type(module).__name__)
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                built = module()
        except Exception as error:
            raise ValueError(
                f"{name} cannot be built on the meta device: {type(error).__name__}: {error}. A class or factory is "
                "called without arguments, and must not read values of tensors; hand over a module that is built "
                "instead, or functools.partial with the arguments"
            ) from error
        if not isinstance(built, nn.Module):
            raise ValueError(f"{name} gives a {type(built).__name__}; want a torch.nn.Module")
    if lazy := [name for name, p in (*built.named_parameters(), *built.named_buffers()) if is_lazy(p)]:
        raise ValueError(f"{lazy[0]} has no shape yet; call the module once before memory is planned")
    return built  # type: ignore[no-any-return]


def without_numbers(module: nn.Module, empty: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy ``module``, with each parameter, buffer and tensor attribute replaced by the result of ``empty``.

    Shared parameters stay shared. The values of these tensors are not copied; those of tensors that a module holds in
    a list or dict are.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        own = [*vars(part).get("_parameters", {}).values(), *vars(part).get("_buffers", {}).values()]
        for tensor in (*own, *vars(part).values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = like(tensor, empty(tensor))
    return copy.deepcopy(module, memo)


def like(tensor: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Return ``empty`` as a leaf: for a parameter, a parameter with the same ``requires_grad``, else a plain tensor."""
    if not isinstance(tensor, nn.Parameter):
        return empty.detach()
    # nn.Parameter is not called, since a run counts its calls.
    if type(empty) is not torch.Tensor:  # as the constructor does for subclasses of Tensor
        found = empty.detach().requires_grad_(tensor.requires_grad)
        vars(found)["_is_param"] = True
        return found
    return torch.Tensor._make_subclass(nn.Parameter, empty.detach(), tensor.requires_grad)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf on the meta device with the shape and type of ``tensor``; it takes no memory."""
    return like(tensor, torch.empty_like(tensor, device="meta"))
