"""``lagom.batches.batch_shares``: each rank's share of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lagom.batches.batch_shares import BatchIndices, split_batch, split_batch_group
from lagom.run_state.loader_pass import BatchShare


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 4, 7, 9])
def test_split_deals_every_position_once(length: int, world_size: int) -> None:
    dealt = [split_batch(list(range(length)), rank, world_size) for rank in range(world_size)]
    assert sorted(position for mine, share in dealt for position in mine[: share.num_mine]) == list(range(length))
    assert sum(share.weight(world_size) for _, share in dealt) == pytest.approx(world_size)
    assert all(mine for mine, _ in dealt)
    assert all(share.even == (length % world_size == 0) for _, share in dealt)


def test_split_takes_tensors_and_iterables() -> None:
    assert split_batch(torch.arange(5), 1, 2)[0].tolist() == [1, 3]
    assert split_batch(iter(range(5)), 0, 2)[0] == [0, 2, 4]


def test_per_rank_keeps_whole_batches_and_deals_out_a_tail() -> None:
    assert split_batch_group([[1, 2], [3]], 1, 2, drop_last=False) == ([3], BatchShare(1, 3, False))
    assert split_batch_group([[1, 2, 3]], 1, 2, drop_last=False) == ([2], BatchShare(1, 3, False))
    assert split_batch_group([[1, 2, 3]], 1, 2, drop_last=True) is None


class Halves(BatchIndices):
    """Indices that ranks get as blocks, not every ``world_size``-th one."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: slice) -> list[int]:
        return self.numbers[index]

    def deal(self, rank: int, world_size: int) -> list[int]:
        size = len(self.numbers) // world_size
        return self.numbers[rank * size : (rank + 1) * size]

    @staticmethod
    def together(batches: Sequence[Halves]) -> Halves:
        return Halves([number for batch in batches for number in batch.numbers])


def test_batch_indices_are_split_by_their_own_methods() -> None:
    assert split_batch(Halves(range(4)), 1, 2) == ([2, 3], BatchShare(2, 4, True))
    group = [Halves([0, 1]), Halves([2, 3])]
    assert split_batch_group(group, 0, 2, drop_last=True) == ([0, 1], BatchShare(2, 4, True))
    assert split_batch_group(group[:1], 1, 2, drop_last=False) == ([1], BatchShare(1, 2, True))
