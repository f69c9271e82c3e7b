"""``Engine``: one DeepSpeed engine, with the module and the optimizer that it drives."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from lagom.errors import LagomError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.optim import Optimizer


class Engine:
    """Drives the program's module and optimizer by one DeepSpeed engine.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        optimizer: None if DeepSpeed made its own from ``deepspeed_config``.
        stage: the ZeRO stage, from 0 to 3.
    """

    def __init__(self, engine: Any, module: nn.Module, optimizer: Optimizer | None, stage: int) -> None:
        self._engine = engine
        self.module = module
        self.optimizer = optimizer
        self.leaves = [p for p in module.parameters() if p.requires_grad]
        self.num_backwards = 0
        """Backwards since the last step that changed parameters."""
        self._stage = stage
        self._reached: set[int] = set()
        enabled = engine.fp16_enabled(), engine.bfloat16_enabled()
        self.dtype = torch.float16 if enabled[0] else torch.bfloat16 if enabled[1] else None
        """Half-precision type to which the engine cast the module's parameters; None if it left their types alone."""
        self._step_in_place()

    @property
    def keeps_gradients(self) -> bool:
        """Whether the engine holds gradients and optimizer state, instead of ``Parameter.grad`` and the optimizer."""
        engine = self._engine
        averages = engine.managed_gradient_accumulation() and engine.gradient_accumulation_steps() == 1
        return self._stage > 0 or self.dtype is not None or not averages

    def scale(self) -> float:
        """Return the factor for the root of a backward: the loss scale, divided by the engine's accumulation steps."""
        one = torch.ones((), requires_grad=True) * 1.0
        engine = self._engine
        if hasattr(engine.optimizer, "scale_if_loss"):
            one = engine.optimizer.scale_if_loss(one)
        elif engine.torch_autocast_z0_gradscaler is not None:
            one = engine.torch_autocast_z0_gradscaler.scale(one)
        return float(one.detach()) / int(engine.gradient_accumulation_steps())

    @contextmanager
    def around_backward(self, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
        """Do what ``engine.backward(loss)`` does before and after autograd; ``leaves`` are reached by this backward."""
        engine = self._engine
        self._reached.update(map(id, leaves))
        self.num_backwards += 1
        if hasattr(engine.optimizer, "clear_backward_seen_flag"):
            engine.optimizer.clear_backward_seen_flag()
        engine._running_engine_backward_count += 1
        engine._running_engine_backward = True
        try:
            if not engine.managed_gradient_accumulation():
                engine._unmanaged_backward_count += 1
            engine._backward_prologue()
            yield
            engine._backward_epilogue()
        finally:
            engine._running_engine_backward_count -= 1
            engine._running_engine_backward = engine._running_engine_backward_count > 0

    def unreached(self) -> int:
        """Return the number of trained parameters that no backward has reached since the last step that changed any."""
        return sum(id(p) not in self._reached for p in self.leaves)

    def step(self) -> None:
        """Call ``engine.step()``.

        If the engine counts accumulation, only every n-th call changes parameters (n: its accumulation steps).
        """
        self._take_changes()
        counts = self._engine.managed_gradient_accumulation()
        is_step = self._engine.is_gradient_accumulation_boundary() if counts else True
        self._engine.step()
        if is_step:
            self.num_backwards = 0
            self._reached.clear()

    def _step_in_place(self) -> None:
        """Make DeepSpeed's master copy share the parameters' memory, if type and device are equal.

        This saves the memory of the copy, and the next step starts from values that the program has changed.
        """
        zero = self._engine.optimizer
        able = [
            (own, master)
            for own, master in self._masters()
            if own.dtype == master.dtype and own.device == master.device and not zero.cpu_offload
        ]
        for own, master in able:
            master.data = own.data
        if able:
            zero._link_all_hp_params()  # the links that DeepSpeed made before still point at the copies

    def _masters(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield, at stages 1 and 2, this rank's part of each parameter group and DeepSpeed's master copy of it."""
        zero = self._engine.optimizer
        if self._stage not in (1, 2) or not hasattr(zero, "parallel_partitioned_bit16_groups"):
            return
        for number, master in enumerate(zero.single_partition_of_fp32_groups):
            own = zero.parallel_partitioned_bit16_groups[number][dist.get_rank(zero.real_dp_process_group[number])]
            if own.shape == master.shape:  # otherwise DeepSpeed keeps its master copy elsewhere
                yield own, master

    @torch.no_grad()
    def _take_changes(self) -> None:
        """Copy the elements that the program has changed in its parameters into DeepSpeed's master copies."""
        for own, master in self._masters():
            if own.data_ptr() == master.data_ptr():
                continue
            now = own.to(master.device)
            if now.dtype == master.dtype and torch.equal(now, master):
                continue  # nothing has changed; this test takes half as long as the search for changed elements
            changed = now != master.to(own.dtype)
            if bool(changed.any()):
                master[changed] = now[changed].to(master.dtype)

    def close(self) -> None:
        """Destroy the engine with its hooks. At stage 3, a module has only shards then, so pickling it is an error."""
        self._engine.destroy()
        if self._stage == 3:
            for module in self.module.modules():
                vars(module)["__reduce_ex__"] = functools.partial(refuse_parts, type(module).__name__)


def refuse_parts(name: str, *_: object) -> NoReturn:
    """Raise the error for a copied or pickled module of class ``name``, whose parameters are sharded.

    Raises:
        LagomError: always.
    """
    raise LagomError(
        f"a {name} is copied, saved or returned whose parameters DeepSpeed has in parts (zero_lvl=3); take its "
        "state_dict(), which is whole, or use another level"
    )
