"""``grouped_adam``: Adam and AdamW step a small model's parameters by one call per operation."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import adam

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

_MAX_ELEMENTS = 2**18
"""Largest number of elements of all parameters: with more, intermediate tensors no longer fit into a core's cache."""
_TYPES = (torch.float32, torch.float64)
"""Shorter ones are rounded between operations, and not alike."""
_STEP = "_single_tensor_adam"
"""Torch's function for parameters on a CPU; a version of torch without it steps as it does."""


def grouped_adam() -> AbstractContextManager[None]:
    """Step small models with the operations of torch's Adam, each called once for all parameters.

    Torch calls each operation once per parameter, which takes longer than the arithmetic. The kernels and their
    arguments are the same, and so are the bits. Options that are rare (amsgrad, maximize, capturable, rates that are
    tensors, complex numbers) and parameters that share memory are left to torch.
    """
    original = vars(adam).get(_STEP)
    return nullcontext() if original is None else _replaced_step(original)


@contextmanager
def _replaced_step(original: Callable[..., None]) -> Iterator[None]:
    def step(params: list[Tensor], *tensors: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or not (_is_plain(options) and _is_small(params)):
            original(params, *tensors, **options)
        else:
            grads, means, squares, _, steps, *_ = tensors
            _step(params, grads, means, squares, steps, options)

    with replaced(adam, _STEP, step):
        yield


def _step(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    options: dict[str, Any],
) -> None:
    """Do what ``torch.optim.adam._single_tensor_adam`` does per parameter, in its order of operations."""
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
    return all(isinstance(options[name], float | int) for name in ("beta1", "beta2", "lr", "weight_decay", "eps"))


def _is_small(params: Sequence[Tensor]) -> bool:
    """Return whether ``params`` are few numbers in ordinary tensors of a CPU, each in memory of its own."""
    num_elements, storages = 0, set()
    for param in params:
        if type(param) not in (nn.Parameter, Tensor) or not param.is_cpu or param.dtype not in _TYPES:
            return False
        num_elements += param.numel()
        storages.add(param.untyped_storage().data_ptr())
    return 0 < num_elements <= _MAX_ELEMENTS and len(storages) == len(params)
