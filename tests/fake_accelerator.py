"""A stand-in for torch's module of a kind of accelerator, "hpu", with two devices that hold no tensors.

Each function is one that torch documents for all kinds. ``plugin`` makes a folder for PYTHONPATH, with which torch
itself loads the stand-in in every new process, as it loads the package of a maker.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch

KIND = "hpu"


class FakeStream:
    """A stream of work that only notes what it is asked for."""

    def __init__(self, device: Any = None) -> None:
        self.device, self.waited = device, list[object]()

    def record_event(self) -> object:
        return ("event", self.device)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeModule(types.ModuleType):
    """The functions that each kind has: devices and random numbers, which are those of generators on the CPU."""

    def __init__(self) -> None:
        super().__init__(f"torch.{KIND}")
        self.generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)]
        self.current = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.generators)

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: Any) -> None:
        self.current = _index(device)

    def get_rng_state(self, device: Any = KIND) -> torch.Tensor:
        return self.generators[_index(device)].get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = KIND) -> None:
        self.generators[_index(device)].set_state(new_state)

    def manual_seed(self, seed: int) -> None:
        self.generators[self.current].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    def draw(self) -> float:
        """Return a number that a kernel on the current device would draw."""
        return float(torch.rand((), generator=self.generators[self.current]))


class FullModule(FakeModule):
    """The functions that only some kinds have: streams, memory, properties, precision, graphs."""

    Stream = FakeStream

    def __init__(self) -> None:
        super().__init__()
        self.is_begun, self.records = True, False
        self.streams = [FakeStream(torch.device(KIND, 0)), FakeStream(torch.device(KIND, 1))]

    def current_device(self) -> int:
        self.is_begun = True  # as on NVIDIA's and Intel's: the question makes a context
        return super().current_device()

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(self.generators)

    def is_initialized(self) -> bool:
        return self.is_begun

    def current_stream(self, device: Any = KIND) -> FakeStream:
        return self.streams[_index(device)]

    def stream(self, stream: FakeStream) -> FakeStream:
        return stream

    def is_current_stream_capturing(self) -> bool:
        return self.records

    def memory_allocated(self, device: Any = None) -> int:
        return 3 << 30

    def memory_reserved(self, device: Any = None) -> int:
        return 4 << 30

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 10 << 30, 16 << 30

    def utilization(self, device: Any = None) -> int:
        return 87

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation

    def get_device_properties(self, device: Any = None) -> Any:
        number = _index(device)
        return types.SimpleNamespace(
            name=f"Fake {number}", total_memory=16 << 30, multi_processor_count=132 - number, driver_version="1.2"
        )


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def plugin(folder: Path) -> Path:
    """Write a package to ``folder`` that torch loads in every new process; return ``folder``, for PYTHONPATH."""
    (folder / "fake_maker.py").write_text(_PLUGIN.format(root=str(Path(__file__).parent.parent)))
    info = folder / "fake_maker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-maker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfake = fake_maker:load\n")
    return folder


_PLUGIN = """
import sys

def load():
    import torch
    import torch.distributed as dist
    sys.path.append({root!r})
    from tests.fake_accelerator import KIND, FullModule

    class ProcessGroupFake2(dist.ProcessGroup):
        def shutdown(self):
            pass

    def make(options, backend_options):
        return ProcessGroupFake2(options.group_rank, options.group_size)

    torch.hpu = FullModule()
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device(KIND)
    dist.Backend.register_backend("fakeccl", make, extended_api=True, devices=[KIND])
"""
