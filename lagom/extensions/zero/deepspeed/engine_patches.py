"""``backend="deepspeed"``: patches torch so that the program's forwards, backwards and steps use DeepSpeed's engine."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd
from torch import Tensor, nn
from torch.distributed import HashStore, distributed_c10d

from lagom.errors import LagomError
from lagom.extensions.zero.deepspeed.engine_calls import (
    call_engine,
    engine_backward,
    guarded,
    load_engine,
    not_whole,
    save_engine,
    step_engine,
)
from lagom.extensions.zero.deepspeed.engines import Engines
from lagom.extensions.zero.deepspeed.loading import settings
from lagom.forward.precision import autocast_dtype
from lagom.gradients.autograd_grad import is_averaged
from lagom.gradients.tensor_stores import GradientStore, ParameterStore
from lagom.patching.replace import replaced
from lagom.run_state.leaves import find_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from lagom.session.session import Session

_init = distributed_c10d.init_process_group
"""torch's own function, taken before a run replaces it for the program."""


class EngineGradients(GradientStore):
    """Gradients that DeepSpeed averages."""

    is_external = True


class EngineParameters(ParameterStore):
    """Parameters of DeepSpeed's stage 3."""

    keeps_shards = True


def drive_by_deepspeed(session: Session) -> None:
    """Leave the averages and steps of a run to DeepSpeed's engine, from the run's start on."""
    session.backwards.gradient_store = EngineGradients()
    if session.config.zero_lvl > 2:
        session.backwards.parameter_store = EngineParameters()
    session.events.patched.subscribe(lambda stack: stack.enter_context(driven_by_deepspeed(session)))


@contextmanager
def driven_by_deepspeed(session: Session) -> Iterator[None]:
    """Patch torch for a run: DeepSpeed's engine averages gradients and steps, at ZeRO stage ``zero_lvl``.

    Raises:
        LagomError: if DeepSpeed is not installed or cannot build its op for NVMe, or if ``mixed_precision`` asks lagom
            for fp16 loss scaling.
    """
    plan = session.plan
    if plan.config.mixed_precision and autocast_dtype(plan.config.mixed_precision, session.device) is torch.float16:
        raise LagomError(
            "mixed_precision=True is fp16 on this device, whose scale DeepSpeed keeps itself; set "
            "deepspeed_config={'fp16': {'enabled': True}}"
        )
    engines = Engines(
        settings(plan.config.deepspeed_config, plan.config.zero_lvl, session.say_once),
        rank=session.rank,
        world_size=session.world_size,
        device=session.device,
        store=session.store if session.store is not None else HashStore(),
        replaced=replaced,
        init=_init,
        at=session.check_place,
        say=session.say_once,
    )
    session.forwards.shares_forwards = engines.keeps_parameters
    driver = Driver(session, engines)
    with ExitStack() as stack:
        stack.enter_context(engines.loaded())
        stack.enter_context(step_engine(driver))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", driver.run_backward()))
        for name in ("grad", "_grad"):
            stack.enter_context(replaced(Tensor, name, guarded(driver)))
        for name, make in (("state_dict", save_engine), ("load_state_dict", load_engine), ("__call__", call_engine)):
            stack.enter_context(replaced(nn.Module, name, make(driver, vars(nn.Module)[name])))
        for name in ("__reduce_ex__", "__deepcopy__"):
            if not engines.keeps_parameters:
                stack.enter_context(replaced(nn.Module, name, not_whole(driver, name)))
        # Loops that were written for DeepSpeed call model.backward(loss) and model.step().
        stack.enter_context(replaced(nn.Module, "backward", engine_backward))
        stack.enter_context(replaced(nn.Module, "step", lambda module: driver.step(engines.of_module(module))))
        try:
            yield
        finally:
            engines.close()


class Driver:
    """Starts the engines of a run, and calls them for backwards and steps of the program."""

    def __init__(self, session: Session, engines: Engines) -> None:
        self.session = session
        self.engines = engines
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.inner: dict[type, Callable[..., Any]] = {}
        """The unpatched ``step`` of each optimizer class."""

    def before_forward(self, module: nn.Module) -> None:
        """Start an engine for the parameters of ``module``, unless one drives them; for outermost training forwards.

        Raises:
            LagomError: if several optimizers step these parameters, if no module has all parameters of their optimizer,
                or if DeepSpeed cannot step it as one process does.
        """
        mine = {id(p) for p in module.parameters() if p.requires_grad}
        if not mine or self.engines.drives(module.parameters()):
            return
        able = [one for one in self.optimizers if not mine.isdisjoint(map(id, _parameters(one)))]
        if len(able) > 1:
            raise LagomError(
                f"{len(able)} optimizers step parameters of this {type(module).__name__}; DeepSpeed's engine drives "
                "one: put them into groups of one optimizer, or use backend='torch'"
            )
        # Tensors that the start of an engine saves must not reach the hooks of a checkpoint around this forward.
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            if able:
                self.engines.start(self._whole(able[0]), able[0], self.step_of(able[0]))
            elif "optimizer" in (self.session.config.deepspeed_config or {}):
                self.engines.start(module, None, None)
        for one in [one for one in self.session.tensors.modules if type(one).__module__.startswith("deepspeed.")]:
            del self.session.tensors.modules[one]  # the engine is an nn.Module too, but not one of the program's

    def _whole(self, optimizer: Optimizer) -> nn.Module:
        """Return the smallest module of the program that holds all parameters of ``optimizer``.

        Raises:
            LagomError: if there is none.
        """
        wanted = {id(p) for p in _parameters(optimizer)}
        made: list[nn.Module] = list(self.session.tensors.modules.finished_modules())
        able = [module for module in made if wanted <= {id(p) for p in module.parameters()}]
        if not able:
            raise LagomError(
                f"no module has all parameters that the {type(optimizer).__name__} steps, and DeepSpeed's engine "
                "drives one module; put the models into an nn.ModuleList that the program keeps, or use backend='torch'"
            )
        return min(able, key=lambda one: (sum(1 for _ in one.parameters()), -sum(1 for _ in one.modules())))

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return the unpatched ``step`` of the class of ``optimizer``."""
        return next(self.inner[kind] for kind in type(optimizer).__mro__ if kind in self.inner)

    def run_backward(self) -> Callable[..., Any]:
        """Return a replacement for ``_engine_run_backward``, in which every backward of torch ends."""
        original = torch.autograd._engine_run_backward
        session = self.session

        def run_backward(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
            if not session.live or session.backwards.depth or not options.get("accumulate_grad", False):
                if (
                    session.live
                    and not session.backwards.depth
                    and self.engines.drives(x for x in args[3] if isinstance(x, Tensor))
                ):
                    self._refuse_grad(bool(args[2]))
                return original(outputs, *args, **options)
            leaves = find_leaves(outputs, args[3])
            engine = self.engines.backward(leaves)
            self._refuse_undriven(leaves)
            if engine is None:
                return original(outputs, *args, **options)
            session.check_place("backward()")
            session.distributed_part = session.distributed_part or "a backward ran"
            session.begin_backward(outputs, leaves)
            gradients, hooks = session.backwards.loss_weights.weight_gradients(outputs, args[0], session.weight)
            scale = engine.scale()
            if scale != 1.0:
                gradients = tuple(None if one is None else one * scale for one in gradients)
            session.backwards.depth += 1
            try:
                with self.engines.running(), engine.around_backward(leaves):
                    result = original(outputs, gradients, *args[1:], **options)
            finally:
                session.backwards.depth -= 1
                for hook in hooks:
                    hook.remove()
            if session.backwards.divergence is not None:
                session.backwards.divergence.count_step()
                if self.engines.keeps_parameters:
                    numbers = [session.tensors.leaves.known(leaf) for leaf in leaves]
                    session.backwards.divergence.add_trained(number for number in numbers if number is not None)
            session.record_backward()
            return result

        return run_backward

    def _refuse_grad(self, is_graph: bool) -> None:
        if not is_graph:  # with create_graph=True a backward follows (a gradient penalty), which is averaged
            raise LagomError(
                "torch.autograd.grad of parameters gives this rank's own gradients with backend='deepspeed', which "
                "averages them in backward() only; use backend='torch'"
            )

    def _refuse_undriven(self, leaves: Sequence[Tensor]) -> None:
        session = self.session
        shared_out = session.passes.share is not None or session.config.batches == "whole"
        name_of = session.tensors.modules.name_of
        for leaf in leaves if session.world_size > 1 else ():
            if not self.engines.drives([leaf]) and is_averaged(leaf, session.likeness(leaf), shared_out=shared_out):
                raise LagomError(
                    f"a backward reaches {name_of(leaf)}, which DeepSpeed does not drive, so that its gradient "
                    "would be this rank's own: make the optimizer before the first training forward, and call the "
                    "module rather than its functions; freeze what is not trained (requires_grad_(False)); or use "
                    "backend='torch', which averages all gradients"
                )

    def step(self, engine: Any) -> None:
        """Step ``engine`` for the program; say once if some parameters have no gradient."""
        if missing := engine.unreached():
            self.session.say_once(
                f"{missing} parameters have no gradient in a step; DeepSpeed steps them as if it were zero, and one "
                "process would leave them out: what weight decay and momentum do to them is different"
            )
        with self.engines.running():
            engine.step()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
