"""Data sets and samplers, and helpers that collect the batches of loaders."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

import lagom
from lagom.session.session import Session


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


class Broken(Numbers):
    """A data set that fails for one index."""

    def __init__(self, count: int, broken: int) -> None:
        super().__init__(count)
        self.broken = broken

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise KeyError(f"sample {index} is broken")
        return index


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


class Stream(IterableDataset[Any]):
    """A stream of 0, 1, 2, ...; as in torch, each worker of a loader gives all of it."""

    def __init__(self, count: int = 7) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


class WorkerSharded(Stream):
    """A stream of which each worker gives a part of another size."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return iter(range(self.count))
        cut = self.count // 3
        return iter(range(cut)) if worker.id == 0 else iter(range(cut, self.count))


class Shuffled(Stream):
    """A stream in a random order, each number together with random ones."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.count).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        for number in order:
            yield number, torch.rand(()).item(), random.random(), np.random.rand()


class Unseeded(Stream):
    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.count))
        np.random.default_rng(int.from_bytes(os.urandom(8), "little")).shuffle(order)
        return iter(order)


class RankSharded(Stream):
    """A self-sharded stream: each rank gets a part of another size."""

    lagom_sharded = True

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            if min(number // 4, lagom.world_size() - 1) == lagom.rank():
                yield number


class OwnLoader(DataLoader[Any]):
    pass


class Doubling(DataLoader[Any]):
    """A loader with an ``__iter__`` of its own."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield 2 * batch


class Endless(DataLoader[Any]):
    """A loader that makes its one iterator at once and keeps it, to keep its workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]


class Repeating:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


def noisy_collate(samples: list[Any]) -> Any:
    """Draw one number for each sample."""
    drawn = [torch.rand(()).item() + random.random() + np.random.rand() for _ in samples]
    return default_collate(samples), drawn


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(parts: Any) -> list[int]:
    return sorted(index for part in parts for batch in part for index in batch)


def seen(loader: Any, session: Session) -> list[list[int]]:
    """Return the batches of a pass, without copies that count nowhere."""
    epoch = []
    for batch in loader:
        share = session.passes.share
        epoch.append(batch.tolist() if share is None else batch.tolist()[: share.num_mine])
    return epoch


def epochs(loader: Any, session: Session) -> Any:
    """Return the batches of two epochs."""
    return [seen(loader, session) for _ in range(2)]


def dealt(batch: list[int], world_size: int) -> list[list[int]]:
    """Return each rank's part of a batch."""
    return [batch[rank::world_size] for rank in range(world_size)]
