"""Replacements for methods of modules, optimizers and tensors: they call DeepSpeed's engine, or refuse the call."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lagom.errors import LagomError
from lagom.extensions.zero.deepspeed.engine import refuse_parts
from lagom.optimizers.step_patches import replace_steps
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.extensions.zero.deepspeed.engine_patches import Driver


@contextmanager
def step_engine(driver: Driver) -> Iterator[None]:
    """Patch ``step``, ``zero_grad`` and the state of optimizers, so that optimizers with an engine use the engine."""
    with ExitStack() as stack:
        stack.enter_context(replace_steps(partial(_step, driver), existing=False))
        wrap = vars(Optimizer)["_patch_step_function"]

        def patched_wrap(self: Optimizer) -> None:
            wrap(self)
            if not driver.engines.inside:
                driver.optimizers.add(self)

        stack.enter_context(replaced(Optimizer, "_patch_step_function", patched_wrap))
        for name in ("zero_grad", "state_dict", "load_state_dict"):
            stack.enter_context(replaced(Optimizer, name, _own(driver, name)))
        yield


def _step(driver: Driver, kind: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    driver.inner[kind] = inner

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        engines = driver.engines
        if not driver.session.live or engines.inside:
            return inner(self, *args, **kwargs)
        engine = engines.of(self)
        if engine is None:
            if driver.session.world_size > 1:
                raise LagomError(
                    f"the {type(self).__name__} steps before any training forward of its model, or after the model has "
                    "got another optimizer; backend='deepspeed' drives one optimizer for each model"
                )
            return inner(self, *args, **kwargs)
        if args or any(value is not None for value in kwargs.values()):
            raise LagomError("optimizer.step(closure) cannot go through DeepSpeed's engine; use backend='torch'")
        return driver.step(engine)

    return step


def _own(driver: Driver, name: str) -> Callable[..., Any]:
    original = vars(Optimizer)[name]

    @functools.wraps(original)
    def patched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        engines = driver.engines
        engine = engines.of(self) if driver.session.live and not engines.inside else None
        if engine is None or not engine.keeps_gradients:
            return original(self, *args, **kwargs)
        if name != "zero_grad":
            raise LagomError(
                f"optimizer.{name}() at zero_lvl={engines.stage} would be DeepSpeed's part of one rank; use "
                "backend='torch', where it is whole, or save the model's state_dict(), which is whole here too"
            )
        if engine.num_backwards and "gradient_accumulation_steps" not in (driver.session.config.deepspeed_config or {}):
            raise LagomError(
                "zero_grad() throws gradients away that DeepSpeed has taken over already; call it before backward() or "
                "after step(), or use backend='torch'"
            )
        return None  # the engine's step has cleared the gradients

    return patched


def guarded(driver: Driver) -> property:
    """Return a replacement for ``Tensor.grad`` that raises an error while DeepSpeed holds the gradient in parts."""
    original = vars(torch._C.TensorBase)["grad"]

    def read(tensor: Tensor) -> Any:
        session, engines = driver.session, driver.engines
        if session.live and not engines.inside and not session.backwards.depth and engines.dirty(tensor):
            name = session.tensors.modules.name_of(tensor)
            raise LagomError(
                f"the gradient of {name} is asked for, which DeepSpeed keeps in parts; "
                "for clipping set deepspeed_config={'gradient_clipping': max_norm} and take the call out, for anything "
                "else use backend='torch', where gradients are whole at every level"
            )
        return original.__get__(tensor)

    def write(tensor: Tensor, value: Tensor | None) -> None:
        original.__set__(tensor, value)

    return property(read, write, original.__delete__, original.__doc__)


def save_engine(driver: Driver, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``Module.state_dict`` that gathers sharded parameters: a collective at stage 3."""

    @functools.wraps(original)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engines = driver.engines
        if not driver.session.live or engines.inside or engines.keeps_parameters:
            return original(self, *args, **kwargs)
        with engines.gathered(self, "state_dict()"), engines.running():
            found = original(self, *args, **kwargs)
            for key, value in list(found.items()):
                if isinstance(value, Tensor):
                    found[key] = value.detach().clone()  # on leaving, DeepSpeed shards the parameters again
            return found

    return state_dict


def load_engine(driver: Driver, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``Module.load_state_dict`` that writes to whole parameters: a collective at stage 3."""

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engines = driver.engines
        if not driver.session.live or engines.inside:
            return original(self, *args, **kwargs)
        with engines.gathered(self, "load_state_dict()", changed=True):
            return original(self, *args, **kwargs)

    return load_state_dict


def call_engine(driver: Driver, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``Module.__call__``: it starts engines, and casts inputs and outputs for fp16 or bf16.

    Only the outermost call of a forward does this.
    """
    session, engines = driver.session, driver.engines
    inside = False

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if (
            inside
            or not session.live
            or session.backwards.depth
            or engines.inside
            or torch.compiler.is_dynamo_compiling()
        ):
            return original(module, *args, **kwargs)
        inside = True
        try:
            if torch.is_grad_enabled():
                driver.before_forward(module)
            is_driven = engines.drives(module.parameters())
            if is_driven and not engines.keeps_parameters:
                # The forward gathers parameters: without this check, ranks would wait for a rank that runs other code.
                session.check_place("a forward")
            dtype = engines.of_module(module).dtype if is_driven else None
            if dtype is None:
                return original(module, *args, **kwargs)
            # The engine has cast the module to half precision, but the program passes and expects float32.
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
            outputs = original(module, *args, **kwargs)
            return tree_map_only(Tensor, lambda x: x.float() if x.dtype == dtype else x, outputs)
        finally:
            inside = False

    return call


def not_whole(driver: Driver, name: str) -> Callable[..., Any]:
    """Return a replacement for ``Module.__reduce_ex__`` or ``__deepcopy__`` that refuses sharded modules."""

    def refuse(self: nn.Module, argument: Any) -> Any:
        if driver.session.live and any(hasattr(p, "ds_id") for p in self.parameters()):
            refuse_parts(type(self).__name__)
        if name == "__reduce_ex__":
            return object.__reduce_ex__(self, argument)
        made: Any = self.__reduce_ex__(4)
        return copy._reconstruct(self, argument, *made)  # type: ignore[attr-defined]

    return refuse


def engine_backward(module: nn.Module, loss: Tensor, retain_graph: bool = False, **_: Any) -> Tensor:
    """Run the backward of ``loss``, as ``model.backward(loss)`` in a loop for DeepSpeed does, and return ``loss``."""
    loss.backward(retain_graph=retain_graph)
    return loss
