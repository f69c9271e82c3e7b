"""``lagom.exchange.mesh_transport``: tensors by messages, where ranks of one host share no memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lagom.exchange import shared_memory as handing
from lagom.session.session import Session
from tests.doors import listening
from tests.ranks import run_ranks

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


def given(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any type."""
    return ((torch.arange(count) * 7 + rank) % 13).to(dtype)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])  # three show it
def test_tensors_of_any_size_and_type_are_exchanged_and_no_port_is_open(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing, "native", lambda: None)

    def run(session: Session) -> Any:
        group, rank, wrong = session.group, session.rank, []
        before = listening([os.getpid()])  # what the tests' own process has open
        assert group is not None
        group.open_aside()
        for dtype in TYPES:
            # The last in several messages, if its elements have eight bytes.
            for count in (0, 1, 5, 300_001 if dtype.itemsize == 8 else 10_001):
                every = [given(peer, count, dtype) for peer in range(world_size)]
                total = every[rank].clone()
                beside = every[rank].clone()
                work = group.all_reduce_aside(beside)
                group.all_reduce(total)
                group.wait(work)
                sent = every[rank].clone()
                group.broadcast(sent, world_size - 1)
                gathered = torch.stack(group.all_gather(every[rank]))
                into = torch.empty(world_size * count, dtype=dtype)
                group.all_gather_into(into.view(torch.uint8), every[rank].view(torch.uint8))
                rows = torch.stack([every[rank] + peer for peer in range(world_size)])
                dealt = group.all_to_all(rows)
                wanted = torch.stack(every)
                right = {
                    "all_reduce": torch.equal(total, wanted.sum(0, dtype=dtype)),
                    "all_reduce_aside": torch.equal(beside, wanted.sum(0, dtype=dtype)),
                    "broadcast": torch.equal(sent, every[-1]),
                    "all_gather": torch.equal(gathered, wanted),
                    "all_gather_into": torch.equal(into, wanted.view(-1)),
                    "all_to_all": torch.equal(dealt, wanted + rank),
                }
                wrong += [(name, dtype, count) for name, is_right in right.items() if not is_right]
        group.barrier()
        assert not group.shares_memory
        return wrong, listening([os.getpid()]) == before

    assert run_ranks(world_size, run, patches=False, collectives="auto") == [([], True)] * world_size


def test_sums_of_types_that_memory_does_not_carry_open_no_port() -> None:
    def run(session: Session) -> Any:
        assert session.group is not None
        before = listening([os.getpid()])
        one = torch.tensor([1 + 2j]) * (session.rank + 1)
        session.group.all_reduce(one)
        return one.tolist(), listening([os.getpid()]) == before

    assert run_ranks(2, run, patches=False, collectives="auto") == [([3 + 6j], True)] * 2
