"""``torch.lagomtest``: the test device's module, which ``load`` registers, as a vendor's package does for its device.

See Note [A late device] in csrc/device.hpp for what is late, and docs in CONTRIBUTING.md for what the device is for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.accelerator.device_build import MODULE, library

NAME = "lagomtest"
_Device = int | str | torch.device | None


def load() -> None:
    """Register the device with torch: once in a process, and before it is used there."""
    if MODULE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(MODULE, library())
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules[MODULE] = native
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _add_fused_cells()
    from tests.accelerator.collective_backend import register

    register()


def _module(native: Any) -> ModuleType:
    """Return the module for the compiled part ``native``."""
    module = ModuleType(f"torch.{NAME}", __doc__)
    for part in (DeviceFunctions(native), StreamFunctions(native), Memory(native), Generators(native)):
        for name in dir(type(part)):
            if not name.startswith("__"):
                setattr(module, name, getattr(part, name))
    for name in ("enqueue", "drain", "num_pending", "num_synchronized"):
        setattr(module, name, getattr(native, name))
    module.__dict__.update(Stream=Stream, Event=Event, device=device, StreamContext=stream, stream=stream)
    return module


def index_of(which: _Device) -> int:
    """Return a device's number; the current one's for None and for a name without a number."""
    if isinstance(which, int):
        return which
    index = None if which is None else torch.device(which).index
    return int(sys.modules[MODULE].current_device()) if index is None else index


class DeviceFunctions:
    """What a module of a device has to say of the devices."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def is_available(self) -> bool:
        return bool(self._native.device_count())

    def is_initialized(self) -> bool:
        return bool(self._native.is_initialized())

    def init(self) -> None:
        self._native.initialize()

    def _lazy_init(self) -> None:
        self._native.initialize()

    def _is_in_bad_fork(self) -> bool:
        return bool(self._native.in_bad_fork())

    def device_count(self) -> int:
        return int(self._native.device_count())

    def current_device(self) -> int:
        return int(self._native.current_device())

    def set_device(self, device: _Device) -> None:
        self._native.set_device(index_of(device))

    def get_device_name(self, device: _Device = None) -> str:
        return f"{NAME} device"

    def get_device_properties(self, device: _Device = None) -> SimpleNamespace:
        index = index_of(device)
        total = torch._C._accelerator_getMemoryInfo(index)[1] if self.is_available() else 0
        return SimpleNamespace(name=self.get_device_name(index), total_memory=total, multi_processor_count=1)

    def get_device_capability(self, device: _Device = None) -> tuple[int, int]:
        return (1, 0)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def set_sync_debug_mode(self, mode: str) -> None:
        """Have every operation for which the host waits fail ("error"), or none ("default"), as torch.cuda's."""
        self._native.forbid_synchronizing(mode == "error")


class StreamFunctions:
    """Streams and their order; ``torch.Stream`` and ``torch.Event`` know the device."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def synchronize(self, device: _Device = None) -> None:
        torch.accelerator.synchronize(index_of(device))

    def current_stream(self, device: _Device = None) -> torch.Stream:
        return torch.accelerator.current_stream(index_of(device))

    def default_stream(self, device: _Device = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=index_of(device), device_type=_type_number())

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def is_current_stream_capturing(self) -> bool:
        return False


class Memory:
    """Memory of a device, counted in bytes."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def memory_allocated(self, device: _Device = None) -> int:
        return torch.accelerator.memory_allocated(index_of(device))

    def max_memory_allocated(self, device: _Device = None) -> int:
        return torch.accelerator.max_memory_allocated(index_of(device))

    def memory_reserved(self, device: _Device = None) -> int:
        return self.memory_allocated(device)

    def max_memory_reserved(self, device: _Device = None) -> int:
        return self.max_memory_allocated(device)

    def reset_peak_memory_stats(self, device: _Device = None) -> None:
        torch.accelerator.reset_peak_memory_stats(index_of(device))

    def memory_stats(self, device: _Device = None) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(index_of(device)))

    def mem_get_info(self, device: _Device = None) -> tuple[int, int]:
        free, total = torch._C._accelerator_getMemoryInfo(index_of(device))
        return free, total

    def empty_cache(self) -> None:
        """Do nothing: memory is given back when it is free."""

    def set_total_memory(self, size: int, device: _Device = None) -> None:
        """Have the device own ``size`` bytes; a request beyond them raises ``torch.OutOfMemoryError``."""
        self._native.set_total_bytes(index_of(device), size)

    def set_per_process_memory_fraction(self, fraction: float, device: _Device = None) -> None:
        """Have this process own a part of 16 GiB, the memory of a device."""
        self.set_total_memory(int(fraction * (16 << 30)), device)


class Generators:
    """The devices' own random generators."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """One for each device, counted when the device is registered."""
        return tuple(self._native.default_generator(index) for index in range(self._native.device_count()))

    def manual_seed(self, seed: int) -> None:
        self._native.default_generator(index_of(None)).manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self._native.device_count()):
            self._native.default_generator(index).manual_seed(int(seed))

    def seed(self) -> None:
        self._native.default_generator(index_of(None)).seed()

    def initial_seed(self) -> int:
        return int(self._native.default_generator(index_of(None)).initial_seed())

    def get_rng_state(self, device: _Device = NAME) -> torch.Tensor:
        state: torch.Tensor = self._native.default_generator(index_of(device)).get_state()
        return state

    def set_rng_state(self, new_state: torch.Tensor, device: _Device = NAME) -> None:
        self._native.default_generator(index_of(device)).set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self._native.device_count())]

    def set_rng_state_all(self, new_states: Iterable[torch.Tensor]) -> None:
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)


def Stream(device: _Device = None, priority: int = 0) -> torch.Stream:
    """Return a new stream, as ``torch.cuda.Stream()``."""
    return torch.Stream(torch.device(NAME, index_of(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    """Return a new event, as ``torch.cuda.Event()``."""
    return torch.Event(device=torch.device(NAME), enable_timing=enable_timing, blocking=blocking)


@contextmanager
def device(which: _Device) -> Iterator[None]:
    """Context manager in which a device is the current one; negative numbers change nothing."""
    index, native = index_of(which), sys.modules[MODULE]
    before = native.current_device()
    if index >= 0:
        native.set_device(index)
    try:
        yield
    finally:
        native.set_device(before)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Context manager in which a stream is the current one; None changes nothing."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device_index)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _type_number() -> int:
    return int(torch._C._autograd.DeviceType.PrivateUse1.value)


_cells: list[torch.library.Library] = []


def _add_fused_cells() -> None:
    """Implement the cells of recurrent layers for which torch has kernels on accelerators alone."""
    cells = torch.library.Library("aten", "IMPL")
    cells.impl("_thnn_fused_lstm_cell", _lstm_cell, "PrivateUse1")
    cells.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "PrivateUse1")
    cells.impl("_thnn_fused_gru_cell", _gru_cell, "PrivateUse1")
    cells.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "PrivateUse1")
    _cells.append(cells)  # kept: its kernels end with it


def _with_biases(gates: torch.Tensor, *biases: torch.Tensor | None) -> torch.Tensor:
    for bias in biases:
        gates = gates if bias is None else gates + bias
    return gates


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = (_with_biases(hidden_gates, hidden_bias) + _with_biases(input_gates, input_bias)).chunk(4, 1)
    taken, kept, new, given = parts[0].sigmoid(), parts[1].sigmoid(), parts[2].tanh(), parts[3].sigmoid()
    state = (kept * cell).add_(taken * new)
    return given * state.tanh(), state, torch.cat((taken, kept, new, given), 1)


def _lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_cell: torch.Tensor | None,
    cell: torch.Tensor,
    state: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    if grad_hidden is None and grad_cell is None:
        return (None, None, None)
    taken, kept, new, given = workspace.chunk(4, 1)
    squashed = state.tanh()
    hidden = torch.zeros_like(state) if grad_hidden is None else grad_hidden
    of_state = hidden * given * (1 - squashed * squashed)
    if grad_cell is not None:
        of_state = of_state + grad_cell
    gates = (
        of_state * new * (1 - taken) * taken,
        of_state * cell * (1 - kept) * kept,
        of_state * taken * (1 - new * new),
        hidden * squashed * (1 - given) * given,
    )
    of_gates = torch.cat(gates, 1)
    return of_gates, of_state * kept, of_gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    of_input = _with_biases(input_gates, input_bias).chunk(3, 1)
    of_hidden = _with_biases(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (of_hidden[0] + of_input[0]).sigmoid(), (of_hidden[1] + of_input[1]).sigmoid()
    new = (of_input[2] + reset * of_hidden[2]).tanh()
    return (hidden - new) * update + new, torch.cat((reset, update, new, hidden, of_hidden[2]), 1)


def _gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    reset, update, new, hidden, of_hidden = workspace.chunk(5, 1)
    of_new = grad * (1 - update) * (1 - new * new)
    of_reset = of_new * of_hidden * (1 - reset) * reset
    of_update = grad * (hidden - new) * (1 - update) * update
    input_gates, hidden_gates = (torch.cat((of_reset, of_update, last), 1) for last in (of_new, of_new * reset))
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, grad * update, *biases
