"""``lagom.on_rank.oom_report``: what reaches the driver when a rank has no memory left."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.extension import Extension
from lagom.on_rank import oom_report
from lagom.on_rank.oom_report import Shortage, add_memory_report, held_memory
from lagom.run_state.oom_errors import wanted_bytes
from lagom.session.session import Session
from tests.ranks import run_ranks, session_alone

WIDTH = 512
MB = 1 << 20


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    network = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        network(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    network(torch.randn(4, WIDTH)).square().mean().backward()
    return network, optimizer


def test_an_absurd_allocation_comes_home_with_its_rank_and_what_was_held() -> None:
    def train() -> None:
        model = torch.nn.Linear(512, 512, bias=False)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 512)).sum().backward()
        optimizer.step()
        torch.empty(1 << 46)

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2))
    assert type(caught.value) is RuntimeError
    text = str(caught.value)
    assert "of 2 ran out of memory: 281 TB were wanted at once" in text
    assert "1.05 MB of parameters, 1.05 MB of gradients, 2.1 MB of optimizer state" in text
    assert "larger than the memory" in text


@pytest.mark.soak  # tests/extensions/zero/test_sharded_parameters.py shows it by default
@pytest.mark.parametrize(("zero_lvl", "parts"), [(0, (1, 1, 2)), (2, (1, 0.5, 1)), (3, (0.5, 0.5, 1))])
def test_what_is_held_is_counted_without_being_put_together(zero_lvl: int, parts: tuple[float, ...]) -> None:
    def found(session: Session) -> tuple[int, ...]:
        before = held_memory(session)
        network, optimizer = _trained()
        now = held_memory(session)
        del network, optimizer
        return tuple(a - b for a, b in zip(now, before, strict=True))

    for row in run_ranks(2, found, zero_lvl=zero_lvl):
        assert row == pytest.approx([part * 4 * WIDTH * WIDTH for part in parts], rel=0.001)


class Proposes(Extension):
    """Knows a setting."""

    def explain_out_of_memory(self, session: Session, shortage: Shortage) -> str:
        """Name the setting, and what is short."""
        return f"less=True would need less than {shortage.wanted} of {len(shortage.optimizers)}"


class Breaks(Extension):
    """Knows none."""

    def explain_out_of_memory(self, session: Session, shortage: Shortage) -> str:
        """Fail."""
        raise ValueError("broken")


@pytest.mark.parametrize(
    ("extensions", "says"),
    [
        ((Breaks(), Extension(), Proposes()), ". less=True would need less than 7 of 0; micro_batches=2 ("),
        ((Breaks(), Extension()), ". More ranks or larger machines, micro_batches=2 ("),
        ((), ". More ranks or larger machines, micro_batches=2 ("),
    ],
)
def test_extensions_may_name_their_settings(
    extensions: tuple[Extension, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom_report, "EXTENSIONS", extensions)
    monkeypatch.setattr(oom_report, "gc", SimpleNamespace(get_objects=list))
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes.")
    add_memory_report(session_alone(tmp_path), error)
    assert says in str(error)


def test_a_limit_of_the_process_is_found_and_named() -> None:
    def fails(session: Session) -> str:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 200 * MB, hard))
        try:
            with pytest.raises(RuntimeError) as caught:
                torch.zeros(400 * MB, dtype=torch.uint8)
            add_memory_report(session, caught.value)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        return str(caught.value)

    for rank, text in enumerate(run_ranks(2, fails)):
        assert f"rank {rank} of 2 ran out of memory: 419 MB were wanted at once" in text
        assert "(what ulimit -v allows)" in text


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (
            functools.partial(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            5 << 29,
        ),
        (functools.partial(torch.OutOfMemoryError, "out of memory"), 0),
        (functools.partial(MemoryError), 0),
        (
            functools.partial(
                RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."
            ),
            7,
        ),
        (functools.partial(RuntimeError, "my allocator has no memory"), None),
        (functools.partial(ValueError, "out of memory"), None),
    ],
)
def test_errors_of_memory_are_told_from_others(
    make: Callable[[], BaseException], wanted: int | None, tmp_path: Path
) -> None:
    error: Any = make()
    text = str(error)
    assert wanted_bytes(error) == wanted
    add_memory_report(session_alone(tmp_path), error)
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert ("rank 0 of 1 ran out of memory" in told) == (wanted is not None)
    assert told.startswith(text)
