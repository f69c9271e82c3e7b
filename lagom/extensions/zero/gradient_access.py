"""``Tensor.grad`` with ``zero_lvl`` 2 or 3: whole for the program, a shard for torch functions that accept one."""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lagom.patching.dynamo import at_compilation
from lagom.patching.importers import Importers
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lagom.extensions.zero.gradient_shards import GradientShards
    from lagom.session.session import Session

_importers = Importers(clip_grad, "clip_grad_norm_", "clip_grad_value_")


@contextmanager
def access_shards(session: Session, gradients: GradientShards) -> Iterator[None]:
    """Patch the functions of torch that see gradients. See Note [Parts of gradients] in gradient_shards.py."""
    with ExitStack() as stack:
        for name in ("grad", "_grad"):
            stack.enter_context(replaced(Tensor, name, _make_grad_property(session, gradients)))
        for owner in (Optimizer, nn.Module):
            stack.enter_context(replaced(owner, "zero_grad", _make_zero_grad(session, gradients, owner)))
        stack.enter_context(replaced(GradScaler, "_unscale_grads_", _make_unscale(session, gradients)))
        made = {"clip_grad_norm_": _make_clip_norm, "clip_grad_value_": _make_clip_value}
        patched = {name: make(session, gradients, vars(clip_grad)[name]) for name, make in made.items()}
        for module, name in _importers.find():
            stack.enter_context(replaced(module, name, patched[name]))
        stack.enter_context(_stop_at_compilation(session, gradients))
        yield


def _make_grad_property(session: Session, gradients: GradientShards) -> property:
    original = vars(torch._C.TensorBase)["grad"]

    def write(tensor: Tensor, value: Tensor | None) -> None:
        if session.live:
            gradients.write(tensor, value)
        else:
            original.__set__(tensor, value)

    def delete(tensor: Tensor) -> None:
        if session.live:
            gradients.write(tensor, None)
        original.__delete__(tensor)

    return property(gradients.read, write, delete, original.__doc__)


def _make_zero_grad(session: Session, gradients: GradientShards, owner: Any) -> Callable[..., None]:
    original = vars(owner)["zero_grad"]

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if session.live:
            if set_to_none:
                gradients.drop(_parameters_of_holder(self))
            with gradients.expose_shards():
                original(self, set_to_none)
        else:
            original(self, set_to_none)

    return zero_grad


def _parameters_of_holder(holder: Any) -> Iterator[Tensor]:
    if isinstance(holder, Optimizer):
        return (p for group in holder.param_groups for p in group["params"])
    parameters: Iterator[Tensor] = holder.parameters()
    return parameters


def _make_unscale(session: Session, gradients: GradientShards) -> Callable[..., Any]:
    original = vars(GradScaler)["_unscale_grads_"]

    @functools.wraps(original)
    def unscale(
        self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        every = list(_parameters_of_holder(optimizer))
        if not session.live or not any(gradients.is_sharded(p) for p in every):
            result: dict[torch.device, Tensor] = original(self, optimizer, inv_scale, found_inf, *args, **kwargs)
            return result
        devices = sorted({p.device for p in every if gradients.has_gradient(p)}, key=str)
        with gradients.expose_shards():
            infinite: dict[torch.device, Tensor] = original(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        mine = [float(infinite[device]) if device in infinite else 0.0 for device in devices]
        rows = gradients.exchange_numbers("GradScaler.unscale_()", mine)
        worst = [max(column) for column in zip(*rows, strict=True)]
        return {
            d: torch.full((), value, dtype=torch.float32, device=d) for d, value in zip(devices, worst, strict=True)
        }

    return unscale


def _make_clip_norm(session: Session, gradients: GradientShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        cut = [p for p in every if gradients.is_sharded(p)] if session.live else []
        if not cut or not float(norm_type) > 0:
            result: Tensor = original(every, max_norm, norm_type, error_if_nonfinite, foreach)
            return result
        with torch.no_grad():
            # Each rank counts its own part, also of gradients that it has read: other ranks may not have read them.
            parts = [part for p in cut if (part := gradients.own_part(p)) is not None]
            whole = [p.grad for p in every if not gradients.is_sharded(p) and p.grad is not None]
            norms = [float(get_total_norm(some, norm_type, False, foreach)) for some in (parts, whole)]
            rows = gradients.exchange_numbers("clip_grad_norm_()", norms[:1])
            total = _combine_norms([row[0] for row in rows] + norms[1:], float(norm_type))
            # The norm of one number is that number: torch's function raises its own error if ``error_if_nonfinite``.
            norm = torch.full((), total, dtype=cut[0].dtype, device=cut[0].device)
            norm = get_total_norm([norm], norm_type, error_if_nonfinite, foreach)
            with gradients.expose_shards():
                clip_grads_with_norm_(every, max_norm, norm, foreach)
        return norm

    return clip_grad_norm_


def _make_clip_value(session: Session, gradients: GradientShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_value_(*args: Any, **kwargs: Any) -> None:
        if session.live:
            with gradients.expose_shards():
                original(*args, **kwargs)
        else:
            original(*args, **kwargs)

    return clip_grad_value_


def _combine_norms(norms: list[float], order: float) -> float:
    if math.isinf(order):
        return math.nan if any(map(math.isnan, norms)) else max(norms)
    largest = max(norms)
    if not math.isfinite(largest) or largest == 0 or any(map(math.isnan, norms)):
        return math.nan if any(map(math.isnan, norms)) else largest
    found: float = math.fsum((norm / largest) ** order for norm in norms) ** (1 / order)
    return largest * found


@contextmanager
def _stop_at_compilation(session: Session, gradients: GradientShards) -> Iterator[None]:
    """Keep gradients whole once the main thread compiles anything: compiled code may read them past the property."""

    def compiles(*_: object) -> None:
        if session.may_meet:
            session.say_once("something is compiled: gradients stay whole on every rank, as with zero_lvl=1")
            gradients.stop()

    with at_compilation(compiles):
        yield
