"""``lagom.exchange.group``: exchanges over a private process group."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lagom.errors import CollectiveError
from lagom.session.session import Session
from tests.ranks import RankFailedError, run_ranks


def test_all_exchanges_give_every_rank_the_same() -> None:
    def exchange(session: Session) -> Any:
        group = session.group
        assert group is not None
        rank = session.rank
        total = torch.full((3,), float(rank + 1))
        group.all_reduce(total)
        value = torch.tensor([rank])
        group.broadcast(value, root=1)
        group.barrier()
        return (
            total.tolist(),
            value.item(),
            group.all_gather_bytes(bytes([rank]) * rank),
            group.all_gather_bytes(b""),
            [group.broadcast_bytes(data * (rank + 1), root=2) for data in (b"", b"abc", b"x" * 10_000)],
            dist.is_initialized(),
        )

    first, *others = run_ranks(3, exchange)
    assert all(other == first for other in others)
    assert first == ([6.0] * 3, 1, [b"", b"\1", b"\2\2"], [b""] * 3, [b"", b"abc" * 3, b"x" * 30_000], False)


def test_a_rank_that_is_gone_is_a_collective_error() -> None:
    def vanish(session: Session) -> None:
        assert session.group is not None
        session.group.connect()
        if session.rank == 1:
            os._exit(3)
        with pytest.raises(CollectiveError, match="all_reduce failed") as caught:
            session.group.all_reduce(torch.zeros(4))
        assert isinstance(caught.value.__cause__, (RuntimeError, OSError))
        pickle.loads(pickle.dumps(caught.value))

    with pytest.raises(RankFailedError, match="rank 1 failed:\nit died"):
        run_ranks(2, vanish)
