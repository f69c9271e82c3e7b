"""``add_memory_report``: adds to an out-of-memory error the memory that the rank held, and settings that need less."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lagom.accelerators import allocated_bytes, is_accelerator, total_bytes
from lagom.available_memory import AvailableMemory, available_memory, format_bytes
from lagom.cluster import device_word
from lagom.extensions.registry import EXTENSIONS
from lagom.optimizers.state_placeholder import StatePlaceholder
from lagom.run_state.memory_layout import storage_of
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lagom.session.session import Session

_slot: Any = vars(torch._C.TensorBase)["grad"]


def add_memory_report(session: Session, error: BaseException) -> None:
    """Add to ``error``, if memory ran out, the memory that the rank held, and settings that need less."""
    if (wanted := wanted_bytes(error)) is None:
        return
    live, session.live = session.live, False  # what extensions try out must not wait for other ranks
    try:
        text = _describe(session, wanted)
    except Exception:  # the report itself may run out of memory
        return
    finally:
        session.live = live
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}",)
    elif hasattr(error, "add_note"):  # numpy's MemoryError, whose ``args`` are a shape and a dtype, not a text
        error.add_note(text)


class HeldMemory(NamedTuple):
    """Bytes that a process holds for parameters, gradients and optimizer state."""

    parameters: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """Bytes of all three together."""
        return sum(self)


class Shortage(NamedTuple):
    """Memory that a rank has and wants, after it ran out of memory."""

    wanted: int
    """Bytes that were wanted at once; 0 if unknown."""
    limit: int
    """Bytes that the rank may use."""
    others: int
    """Bytes of all else than parameters, gradients and optimizer state."""
    parameters: Sequence[torch.Tensor]
    """The parameters of all modules and optimizers in this process."""
    optimizers: Sequence[Optimizer]
    """All optimizers in this process."""


def held_memory(session: Session) -> HeldMemory:
    """Return the bytes of all modules (without buffers) and optimizers in this process; gather no sharded parts."""
    parameters, optimizers = _alive()
    gradients = [gradient for p in parameters if (gradient := _slot.__get__(p)) is not None]
    return HeldMemory(
        _bytes(parameters) + session.backwards.parameter_store.num_bytes(),
        _bytes(gradients) + session.backwards.gradient_store.num_bytes(),
        sum(map(_state, optimizers)),
    )


def _alive() -> tuple[list[torch.Tensor], list[Optimizer]]:
    """Return the parameters of all modules and optimizers in this process, and the optimizers."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), (nn.Module, Optimizer))]
    return _parameters(alive), [one for one in alive if isinstance(one, Optimizer)]


def _parameters(alive: Iterable[Any]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for one in alive:
        if isinstance(one, Optimizer):
            own = [p for group in one.param_groups for p in group["params"]]
        else:
            own = [p for p in vars(one).get("_parameters", {}).values() if p is not None]
        found |= {id(p): p for p in own}
    return list(found.values())


def _state(optimizer: Optimizer) -> int:
    state = vars(optimizer).get("state", {})
    if isinstance(state, StatePlaceholder):
        return state.num_bytes()
    values = [value for own in state.values() if isinstance(own, dict) for value in own.values()]
    return _bytes(value for value in values if isinstance(value, torch.Tensor))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = map(storage_of, tensors)  # ``tensor.untyped_storage`` would gather a sharded parameter
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _describe(session: Session, wanted: int) -> str:
    limit = memory_limit(session)
    now = held_memory(session)
    used = used_memory(session, limit)
    others = max(used - now.total, 0)
    asked = f"{format_bytes(wanted)} were wanted at once" if wanted else "more was wanted"
    return (
        f"rank {session.rank} of {session.world_size} ran out of memory: {asked}, and of "
        f"{format_bytes(limit.num_bytes)} ({limit.where}) it held {format_bytes(now.parameters)} of parameters, "
        f"{format_bytes(now.gradients)} of gradients, {format_bytes(now.state)} of optimizer state, and "
        f"{format_bytes(others)} of activations, data and all else. " + _advice(session, wanted, limit, others)
    )


def _advice(session: Session, wanted: int, limit: AvailableMemory, others: int) -> str:
    if wanted > limit.num_bytes:
        return "That one tensor is larger than the memory: no setting and no number of ranks would change it"
    smaller = "smaller batches (a loop that accumulates gradients over several keeps its meaning)"
    if session.forwards.num_micro_batches > 1:
        smaller = f"micro_batches={2 * session.forwards.num_micro_batches}, twice as many as there were, or {smaller}"
    elif session.config.micro_batches is None and not session.backwards.gradient_store.is_external:
        smaller = f"micro_batches=2 (forwards in parts, where rows do not depend on each other), {smaller}"
    if not session.config.mixed_precision:
        smaller += " or mixed_precision='bf16' would need less for activations"
    shortage = Shortage(wanted, limit.num_bytes, others, *_alive())
    hints = []
    for extension in EXTENSIONS:
        with contextlib.suppress(Exception):  # an optimizer of another package may raise any error
            hints.append(extension.explain_out_of_memory(session, shortage))
    return "; ".join([*filter(None, hints), smaller]) if any(hints) else f"More ranks or larger machines, {smaller}"


def memory_limit(session: Session) -> AvailableMemory:
    """Return the memory that this rank may use."""
    if is_accelerator(session.device) and (total := total_bytes(session.device)) is not None:
        return AvailableMemory(total, f"of its {device_word(session.device.type)}")
    return available_memory(session.local_world_size, gpus=False)


def used_memory(session: Session, limit: AvailableMemory) -> int:
    """Return the bytes that this rank uses of ``limit``."""
    if is_accelerator(session.device) and (allocated := allocated_bytes(session.device)) is not None:
        return allocated
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0 if limit.is_virtual else 1]) * os.sysconf("SC_PAGE_SIZE")
