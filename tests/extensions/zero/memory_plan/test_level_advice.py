"""The ``zero_lvl`` that the report of a rank without memory names."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lagom.available_memory import AvailableMemory
from lagom.on_rank import oom_report
from lagom.on_rank.oom_report import add_memory_report, held_memory
from lagom.session.session import Session
from tests.ranks import run_ranks

again = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("world_size", "zero_lvl", "room", "says"),
    [
        again(2, 1, 12, "zero_lvl=2 would fit: 4 MB of parameters, 2 MB of gradients and 4 MB of state on each rank"),
        again(2, 0, 7, "zero_lvl=3 would need less, which may not be enough"),
        again(2, 2, 9.5, "zero_lvl=3 would fit: 2 MB of parameters, 2 MB of gradients and 4 MB of state on each rank"),
        again(2, 3, 7, "More ranks or larger machines, micro_batches=2 ("),
        (1, 0, 14, "world_size=2 with zero_lvl=1 would fit"),
    ],
)
def test_the_level_that_would_fit_is_named(
    world_size: int, zero_lvl: int, room: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 4 MB (decimal) with Adam, and 1 MB wanted."""
    size = 1_000_000
    monkeypatch.setattr(oom_report, "memory_limit", lambda _: AvailableMemory(int(room * size), "as the test says"))
    monkeypatch.setattr(oom_report, "used_memory", lambda session, _: held_memory(session).total)

    def fails(session: Session) -> str:
        network = nn.Linear(1000, 1000, bias=False)
        optimizer = torch.optim.Adam(network.parameters())
        # Not what other tests have left alive.
        vars(oom_report)["gc"] = SimpleNamespace(get_objects=lambda: [network, optimizer])
        network(torch.randn(2, 1000)).sum().backward()
        optimizer.step()
        error = RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes.")
        add_memory_report(session, error)
        return str(error)

    texts = run_ranks(world_size, fails, zero_lvl=zero_lvl)
    for rank, text in enumerate(texts):
        assert f"rank {rank} of {world_size} ran out of memory: 1 MB were wanted at once" in text
        assert says in text
        assert "mixed_precision='bf16'" in text
