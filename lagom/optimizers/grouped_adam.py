"""``grouped_adam``: let Adam and AdamW step all parameters in one call, or small models in one call per operation."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import adam

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    _Tensors = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
    """Parameters, gradients, running means of gradients, and running means of squared gradients."""

_MAX_ELEMENTS = 2**18
"""Largest number of elements that ``_step`` steps: with more, its intermediate tensors no longer fit a core's cache."""
_TYPES = (torch.float32, torch.float64)
"""Types of parameters that are grouped; grouped calls may round intermediate results of shorter types differently."""
_KINDS = (nn.Parameter, Tensor)
_STEP = "_single_tensor_adam"
"""Name of torch's function for parameters on a CPU; nothing is patched in a version of torch that lacks it."""


def grouped_adam(*, same_bits: bool) -> AbstractContextManager[None]:
    """Patch Adam to step models on a CPU by few calls; torch itself calls eight or more operations per parameter.

    Rare options (amsgrad, maximize, capturable, differentiable, rates that are tensors, complex numbers) are left to
    torch, and all options with torch 2.6.

    Args:
        same_bits: Call the operations of torch's Adam, each once for all parameters of a small model: the kernels and
            their arguments are the same, and so are the bits. If parameters share memory, torch steps all of them.
            If False, call torch's fused Adam, which rounds differently. This suits ranks whose gradients lagom sums,
            since these sums are rounded differently from one process's gradients too.
    """
    original = vars(adam).get(_STEP)
    if original is None:
        return nullcontext()
    return _replaced_step(original, _is_small if same_bits else _is_dense, _step if same_bits else _step_fused)


@contextmanager
def _replaced_step(
    original: Callable[..., None],
    suits: Callable[[_Tensors], bool],
    step_together: Callable[..., None],
) -> Iterator[None]:
    def step(params: list[Tensor], *tensors: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or not _is_plain(options):
            return original(params, *tensors, **options)
        grads, means, squares, _, steps, *_ = tensors
        together = params, grads, means, squares
        if not suits(together):
            return original(params, *tensors, **options)
        return step_together(together, steps, options)

    with replaced(adam, _STEP, step):
        yield


def _step_fused(tensors: _Tensors, steps: list[Tensor], options: dict[str, Any]) -> None:
    fused = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
    numbers = {name: options[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    torch._foreach_add_(steps, 1)
    fused(*tensors, [], steps, **numbers, amsgrad=False, maximize=False)


def _step(tensors: _Tensors, steps: list[Tensor], options: dict[str, Any]) -> None:
    """Do what ``torch.optim.adam._single_tensor_adam`` does per parameter, in its order of operations."""
    params, grads, means, squares = tensors
    beta1, beta2, lr, decay = options["beta1"], options["beta2"], options["lr"], options["weight_decay"]
    torch._foreach_add_(steps, 1)
    if decay and options["decoupled_weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * decay)
    elif decay:
        grads = list(torch._foreach_add(grads, params, alpha=decay))
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    numbers = [step.item() for step in steps]
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(roots, [(1 - beta2**number) ** 0.5 for number in numbers])
    torch._foreach_add_(roots, options["eps"])
    torch._foreach_addcdiv_(params, means, roots, [-(lr / (1 - beta1**number)) for number in numbers])


def _is_plain(options: dict[str, Any]) -> bool:
    rare = ("amsgrad", "maximize", "capturable", "differentiable", "has_complex", "grad_scale", "found_inf")
    if any(options.get(name) is not None and options[name] is not False for name in rare):
        return False
    if "decoupled_weight_decay" not in options:  # torch 2.6, whose AdamW has a step of its own
        return False
    return all(isinstance(options[name], float | int) for name in ("beta1", "beta2", "lr", "weight_decay", "eps"))


def _is_dense(tensors: _Tensors) -> bool:
    """Return whether the fused kernel can step these tensors: it ignores strides, so all must be contiguous."""
    params = tensors[0]
    if not params or params[0].dtype not in _TYPES:
        return False
    dtype = params[0].dtype
    return all(
        type(tensor) in _KINDS and tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous()
        for group in tensors
        for tensor in group
    )


def _is_small(tensors: _Tensors) -> bool:
    """Return whether parameters have few elements, of ``_TYPES`` on a CPU, and each parameter its own memory."""
    num_elements, storages = 0, set()
    params = tensors[0]
    for param in params:
        if type(param) not in _KINDS or not param.is_cpu or param.dtype not in _TYPES:
            return False
        num_elements += param.numel()
        storages.add(param.untyped_storage().data_ptr())
    return 0 < num_elements <= _MAX_ELEMENTS and len(storages) == len(params)
