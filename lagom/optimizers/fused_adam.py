"""``fused_adam``: lets Adam and AdamW step all parameters on a CPU in one call of torch's fused kernel."""

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

_TYPES = (torch.float32, torch.float64)
"""Types of parameters that the fused kernel steps; it rounds intermediate results of shorter types differently."""
_KINDS = (nn.Parameter, Tensor)
_STEP = "_single_tensor_adam"
"""Name of torch's function for parameters on a CPU; nothing is patched in a version of torch that lacks it."""


def fused_adam(applies: Callable[[], bool] = lambda: True) -> AbstractContextManager[None]:
    """Patch Adam to step models on a CPU by torch's fused kernel; torch calls eight or more operations per parameter.

    The kernel rounds differently. This suits ranks whose gradients lagom sums, since these sums are rounded differently
    from one process's gradients too. Rare options (amsgrad, maximize, capturable, differentiable, rates that are
    tensors, complex numbers) are left to torch, and all options with torch 2.6.

    Args:
        applies: returns whether to use the kernel in a step now, equally on all ranks.
    """
    original = vars(adam).get(_STEP)
    return nullcontext() if original is None else _replaced_step(original, applies)


@contextmanager
def _replaced_step(original: Callable[..., None], applies: Callable[[], bool]) -> Iterator[None]:
    def step(params: list[Tensor], *tensors: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or not applies() or not _is_plain(options):
            return original(params, *tensors, **options)
        grads, means, squares, _, steps, *_ = tensors
        together = params, grads, means, squares
        return _step(together, steps, options) if _is_dense(together) else original(params, *tensors, **options)

    with replaced(adam, _STEP, step):
        yield


def _step(tensors: _Tensors, steps: list[Tensor], options: dict[str, Any]) -> None:
    fused = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
    numbers = {name: options[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    torch._foreach_add_(steps, 1)
    fused(*tensors, [], steps, **numbers, amsgrad=False, maximize=False)


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
