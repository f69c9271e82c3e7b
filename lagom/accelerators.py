"""Accelerators: the devices beside the CPU, of any maker, through the interface that torch has for all of them.

torch serves each kind of accelerator ("cuda", "xpu", "hpu", "mps", "mtia", or the name of a backend of another package)
by a module of the same functions. Kinds differ in which functions they have; the other rooms ask here, and name no
kind, except for what is NVIDIA's own. ``cluster.py`` finds the devices of a machine, without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lagom.cluster import NVIDIA

if TYPE_CHECKING:
    from lagom.device_models import DeviceModel


_UNUSED = ("mps",)
"""Kinds that are left alone: Apple's has no float64, in which lagom compares and adds; ranks stay on the CPU."""
_selected: dict[str, int] = {}
"""Number of the device that ``select_device`` has chosen for this process, by its kind."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is neither the CPU nor "meta", which holds no numbers.

    Where each microsecond counts, ask a tensor: ``not tensor.is_cpu``.
    """
    return device.type not in ("cpu", "meta")


def current_accelerator() -> torch.device | None:
    """Return the kind of accelerator of this torch, whether or not the machine has one; None for a build for CPUs.

    Kinds that lagom does not use count as none.
    """
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        device = None
    if device is None:  # a backend that is written in Python alone may be unknown to torch's C++ part
        name = torch._C._get_privateuse1_backend_name()
        device = torch.device(name) if hasattr(torch, name) else None
    if device is not None and device.type != NVIDIA and (torch.version.cuda or torch.version.hip):
        # torch prefers the kind of a package even on a machine that has none of its devices.
        device = device if device_module(device).is_available() else torch.device(NVIDIA)
    return None if device is not None and device.type in _UNUSED else device


def available_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process can use; None without any."""
    found = current_accelerator()
    return found if found is not None and device_module(found).is_available() else None


def device_module(device: torch.device) -> Any:
    """Return torch's module for the kind of ``device``, such as ``torch.cuda``."""
    return torch.get_device_module(device)


def select_device(device: torch.device) -> torch.device:
    """Make ``device`` the one that this process uses, and return it."""
    module = device_module(device)
    _selected[device.type] = device.index or 0
    if hasattr(module, "set_device"):  # Apple's kind has one device
        module.set_device(device.index or 0)
    return device


def is_initialized(device: torch.device) -> bool:
    """Return whether this process has begun to use the kind of ``device``; a read of its state would begin it."""
    module = device_module(device)
    return bool(getattr(module, "is_initialized", module.is_available)())


def current_index() -> int:
    """Return the number of the device that this thread uses; -1 if the process uses no accelerator."""
    device = current_accelerator()
    if device is None or not is_initialized(device):
        return -1
    return int(getattr(device_module(device), "current_device", lambda: 0)())


def dispatch_keys() -> tuple[str, ...]:
    """Return the keys of torch's dispatcher under which the CPU and this torch's accelerator have kernels."""
    device = current_accelerator()
    return ("CPU",) if device is None else ("CPU", torch._C._dispatch_key_for_device(device.type))


# Random numbers.


def generator_states() -> dict[str, list[torch.Tensor]]:
    """Return the states of the generators of all devices under their kind; {} if this process uses no accelerator.

    The state of this process's own device comes first: a rank that sees several uses one of them, and ranks compare
    their states, and resume from one another's.
    """
    device = current_accelerator()
    if device is None or not is_initialized(device):
        return {}
    module = device_module(device)
    return {device.type: [module.get_rng_state(index) for index in _own_first(device)]}


def _own_first(device: torch.device) -> list[int]:
    """Return the numbers of all devices, first that of this process's own, which another thread may not be using."""
    module = device_module(device)
    own = _selected.get(device.type)
    if own is None:
        # To ask for the current device would begin to use it; until then it is the first.
        own = int(module.current_device()) if is_initialized(device) and hasattr(module, "current_device") else 0
    return [own, *(index for index in range(module.device_count()) if index != own)]


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set the generators of the devices to those of ``states`` that are of their kind, by ``generator_states``.

    States of devices that are not here, and of other kinds, are left out: a kind has its own form of a state.
    """
    device = available_accelerator()
    if device is not None and (found := states.get(device.type)):
        module = device_module(device)
        for index, state in zip(_own_first(device), found, strict=False):
            module.set_rng_state(state, index)


def seed_generators(seed: int) -> None:
    """Seed the generators of all devices, if torch is built for any."""
    device = current_accelerator()
    if device is not None:
        module = device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


class _ModuleGenerator:
    """The global generator of a device whose kind has no ``default_generators``."""

    def __init__(self, device: torch.device) -> None:
        self._of_kind, self._index = device_module(device), device.index or 0

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._of_kind.get_rng_state(self._index)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self._of_kind.set_rng_state(state, self._index)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator; a module seeds that of the current device alone."""
        before = int(getattr(self._of_kind, "current_device", lambda: self._index)())
        if before != self._index:
            self._of_kind.set_device(self._index)
        try:
            self._of_kind.manual_seed(seed)
        finally:
            if before != self._index:
                self._of_kind.set_device(before)


def global_generator(device: torch.device) -> torch.Generator | _ModuleGenerator:
    """Return the global generator of ``device``, which has begun to be used: ``get_state``, ``set_state`` and
    ``manual_seed``."""
    if generators := getattr(device_module(device), "default_generators", ()):
        generator: torch.Generator = generators[device.index or 0]
        return generator
    return _ModuleGenerator(device)


class OwnGenerator:
    """A second stream of random numbers, which takes the place of the stream of a device's global generator."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._shares_state = device.type == NVIDIA
        """Whether both generators can share one state, so that draws advance both: NVIDIA's, for CUDA graphs."""
        self._generator: Any = None
        self._state: Any = None
        self._seed = seed

    def swap_in(self) -> Any:
        """Have the device draw from this stream; return what ``swap_out`` needs."""
        if self._generator is None:
            self._generator = global_generator(self._device)
        if self._shares_state:
            if self._state is None:
                self._state = torch.Generator(self._device).manual_seed(self._seed)
            common = self._generator.graphsafe_get_state()
            self._generator.graphsafe_set_state(self._state)
            return common
        common = self._generator.get_state()
        if self._state is None:
            self._generator.manual_seed(self._seed)
        else:
            self._generator.set_state(self._state)
        return common

    def swap_out(self, common: Any) -> None:
        """Have the device draw from the stream that ``swap_in`` has replaced."""
        if self._shares_state:
            self._generator.graphsafe_set_state(common)
            return
        self._state = self._generator.get_state()
        self._generator.set_state(common)


# Memory, and how busy a device is.


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes of torch's tensors on ``device``; None if its kind does not count them."""
    module = device_module(device)
    if hasattr(module, "memory_allocated"):
        return int(module.memory_allocated(device))
    counted = getattr(module, "current_allocated_memory", None)  # Apple's
    return int(counted()) if counted is not None else None


def total_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory of ``device``; None if its kind does not tell."""
    module = device_module(device)
    if (total := device_property(device, "total_memory")) is not None:
        return int(total)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[1])
    recommended = getattr(module, "recommended_max_memory", None)  # Apple's
    return int(recommended()) if recommended is not None else None


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors on ``device`` could still take; None for the CPU, and if its kind does not tell."""
    module = device_module(device)
    if not is_accelerator(device) or not hasattr(module, "mem_get_info"):
        return None
    kept = 0
    if hasattr(module, "memory_reserved"):  # memory that torch keeps for further tensors
        kept = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + int(kept)


def utilization(device: torch.device) -> float:
    """Return the share of the time in which ``device`` was busy lately, from 0 to 1.

    Raises:
        Exception: if its kind does not tell, or the maker's library (for NVIDIA's nvidia-ml-py) is missing.
    """
    return float(device_module(device).utilization(device)) / 100


# Streams, and work that is recorded.


def record_event(tensor: torch.Tensor) -> Any:
    """Return an event after which ``tensor`` may be read; None if nothing has to be waited for, as on the CPU."""
    stream = None if tensor.is_cpu else _current_stream(tensor.device)
    return stream.record_event() if stream is not None else None


def wait_event(event: Any, tensor: torch.Tensor, result: torch.Tensor | None) -> None:
    """Have the current stream of the device of ``tensor`` wait for ``event``, which ``result`` was ready at."""
    stream = _current_stream(tensor.device)
    stream.wait_event(event)
    if result is not None:
        result.record_stream(stream)


def make_stream(device: torch.device) -> Any:
    """Return a new stream of ``device``; None if its kind has no streams, so that its work is in order anyway."""
    module = device_module(device)
    return module.Stream(device) if is_accelerator(device) and hasattr(module, "Stream") else None


def in_stream(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Return a context manager in which work on ``device`` goes to ``stream``, from ``make_stream``."""
    if stream is None:
        return nullcontext()
    context: AbstractContextManager[Any] = device_module(device).stream(stream)
    return context


def _current_stream(device: torch.device) -> Any:
    current = getattr(device_module(device), "current_stream", None)
    return current(device) if current is not None else None


def is_recording(device: torch.device) -> bool:
    """Return whether the current stream records its work for replays, as ``torch.cuda.graph`` makes it."""
    capturing = getattr(device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


# What kind a device is.


def has_bf16(device: torch.device) -> bool:
    """Return whether ``device`` computes in bfloat16 itself; True if its kind does not tell."""
    supported = getattr(device_module(device), "is_bf16_supported", None)
    if supported is None:
        return True
    try:
        return bool(supported(including_emulation=False))
    except TypeError:  # a kind that emulates nothing has no such argument
        return bool(supported())


def device_model(device: torch.device) -> DeviceModel:
    """Return what the numbers of ``device`` may depend on."""
    from lagom.device_models import DeviceModel  # for ranks with an accelerator only

    counts = (device_property(device, name) for name in ("multi_processor_count", "max_compute_units"))
    multiprocessors = next((int(count) for count in counts if count is not None), None)
    name = device_property(device, "name") or _name(device)
    return DeviceModel(kind=device.type, name=str(name), multiprocessors=multiprocessors, driver=_driver(device))


def device_property(device: torch.device, name: str) -> Any:
    """Return a property of ``device`` by torch's name for it; None if its kind has none of that name."""
    properties = getattr(device_module(device), "get_device_properties", None)
    if properties is None:
        return None
    found = properties(device)
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


def _name(device: torch.device) -> str:
    named = getattr(device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else device.type


def _driver(device: torch.device) -> str:
    if (found := device_property(device, "driver_version")) is not None:
        return str(found)
    if device.type != NVIDIA:
        return ""
    return nvidia_driver()


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver, which torch does not tell; "" if there is none."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", path.read_text())
    except OSError:
        return ""
    return found[1] if found else ""
