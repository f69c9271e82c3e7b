"""Data sets and samplers, and what loaders yield from them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lagom.patching.session import Session


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.count


class Drawing(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random()


class Nondeterministic(Sampler[int]):
    def __init__(self, count: int, fail_at: int | None = None) -> None:
        self.count = count
        self.fail_at = fail_at

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        random.Random(os.urandom(8)).shuffle(order)
        for position, index in enumerate(order):
            if position == self.fail_at:
                raise KeyError("no more")
            yield index

    def __len__(self) -> int:
        return self.count


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class OwnLoader(DataLoader[Any]):
    pass


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(parts: Any) -> list[int]:
    return sorted(index for part in parts for batch in part for index in batch)


def epochs(loader: Any, session: Session) -> Any:
    """Two epochs, each as a list of batches; copies that count nowhere left out."""
    seen = []
    for _ in range(2):
        epoch = []
        for batch in loader:
            share = session.share
            epoch.append(batch.tolist() if share is None else batch.tolist()[: share.num_mine])
        seen.append(epoch)
    return seen
