"""A million exchanges through shared memory, of all kinds and sizes, each of them checked."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from lagom.session.session import Session
from tests.ranks import run_ranks

NUM_RUNS = 100
"""Each within the time that a test has."""
EACH = 10_000


def exchanged(session: Session, seed: int) -> int:
    """Do ``EACH`` exchanges; return how many were right."""
    group, rank, size = session.group, session.rank, session.world_size
    assert group is not None
    chosen, num_right = random.Random(seed), 0
    for number in range(EACH):
        count = chosen.choice((0, 1, 7, 64, 1000, 5000)) if number % 500 else 300_000
        held = [torch.arange(count, dtype=torch.float64) % 97 + 3 * k + number % 11 for k in range(size)]
        mine = held[rank].clone()
        kind, root = chosen.randrange(5), chosen.randrange(size)
        if kind == 0:
            group.all_reduce(mine)
            num_right += torch.equal(mine, torch.stack(held).sum(0))
        elif kind == 1:
            group.broadcast(mine, root)
            num_right += torch.equal(mine, held[root])
        elif kind == 2:
            num_right += torch.equal(torch.stack(group.all_gather(mine)), torch.stack(held))
        elif kind == 3:
            rows = group.all_gather_bytes(bytes([k := number % 251]) * (count * (rank + 1)))
            num_right += rows == [bytes([k]) * (count * (other + 1)) for other in range(size)]
        else:
            group.barrier()
            num_right += 1
    return num_right


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_exchanges_give_what_they_should(seed: int) -> None:
    world_size = 2 + seed % 3
    found = run_ranks(world_size, partial(exchanged, seed=seed), patches=False)
    assert found == [EACH] * world_size
