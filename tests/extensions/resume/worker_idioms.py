"""Training programs whose loaders have workers: each ends with a value that tells whether it has gone on exactly."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lagom.data import ParquetDataset
from tests.extensions.resume.idioms import DATA, POINTS, Rows, evaluate, network, weights

NUMBERS = np.random.default_rng(11)
SIZE = 1.0


class Own(Dataset[torch.Tensor]):
    """Draws from generators of its own, one of them made by each worker."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(5)
        self.torchs = torch.Generator().manual_seed(4)
        self.late: random.Random | None = None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        found = torch.rand(3, dtype=torch.float64, generator=self.torchs) + self.numbers.normal()
        return POINTS[index] + found


class Late(Own):
    """Makes a generator when it is asked first."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info: Any = get_worker_info()
        if self.late is None:
            self.late = random.Random(info.seed)
        return super().__getitem__(index) + self.late.random()


class Counting(Dataset[torch.Tensor]):
    """Counts, and remembers the row before."""

    def __init__(self) -> None:
        self.count, self.rows = 0, list[int]()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        self.rows.append(index)
        return POINTS[index] * self.count + POINTS[self.rows[self.count // 2]] + torch.rand(1, dtype=torch.float64)


class Hidden(Dataset[torch.Tensor]):
    """Counts where nobody looks."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        counts[0][index % 2000] += 1
        return POINTS[index] * float(counts[0].sum())


counts = [np.zeros(2000)]


def seed_numbers(worker: int) -> None:
    np.random.seed(worker + 100)


def put_noise(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows) + NUMBERS.normal() * SIZE


def trained(loader: Any, epochs: int = 2) -> Any:
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            seen.append((x.sum().item(), loss.item()))
    return seen, weights(model), torch.rand(2).tolist(), random.random()


def augmented() -> Any:
    return trained(DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=2))


def own_generators() -> Any:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        Own(), batch_size=4, shuffle=True, num_workers=2, generator=generator, worker_init_fn=seed_numbers
    )
    return trained(loader), torch.rand(1, generator=generator).item()


def late_generators() -> Any:
    return trained(DataLoader(Late(), batch_size=4, num_workers=2, drop_last=True, prefetch_factor=1))


def counting() -> Any:
    return trained(DataLoader(Counting(), batch_size=4, shuffle=True, num_workers=2))


def hidden() -> Any:
    counts[0] = np.zeros(2000)
    return trained(DataLoader(Hidden(), batch_size=3, shuffle=True, num_workers=2))


def noisy_batches() -> Any:
    return trained(DataLoader(Own(), batch_size=4, shuffle=True, num_workers=2, collate_fn=put_noise))


def persistent() -> Any:
    """Train with workers that remain, and evaluate between passes."""
    loader = DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
    tests = DataLoader(DATA, batch_size=8, num_workers=1, persistent_workers=True)
    model, seen = network(), list[Any]()
    for epoch in range(3):
        for number, x in enumerate(loader):
            seen.append(x.sum().item())
            if epoch == 1 and number == 3:
                break
        seen.append(evaluate(model, tests))
    return seen, torch.rand(1).item()


class Stream(IterableDataset[torch.Tensor]):
    """Gives each worker other rows, and other numbers of them."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info: Any = get_worker_info()
        for index in range(info.id, 20 if info.id else 9, info.num_workers):
            yield POINTS[index] + torch.rand(3, dtype=torch.float64) + float(np.random.rand())


def streamed() -> Any:
    return trained(DataLoader(Stream(), batch_size=2, num_workers=2))


def samplers() -> Any:
    generator = torch.Generator().manual_seed(1)
    weighted = WeightedRandomSampler([float(one) for one in range(1, 13)], 10, generator=generator)
    first = DataLoader(Rows(), batch_sampler=BatchSampler(weighted, 3, drop_last=True), num_workers=2)
    second = DataLoader(Rows(), batch_size=None, sampler=RandomSampler(Rows(), num_samples=5), num_workers=1)
    found = trained(first)
    return found, trained(second, epochs=1)


def several() -> Any:
    """Read loaders in step, one inside of the other, and leave one early."""
    first = DataLoader(DATA, batch_size=8, shuffle=True, num_workers=1)
    second, seen = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=2), list[Any]()
    for (x, _), z in zip(first, second):  # noqa: B905
        seen.append((x.sum().item(), z.sum().item()))
        for number, rows in enumerate(second):
            seen.append(rows.sum().item())
            if number == 1:
                break
    batches = iter(second)
    rows = next(batches)
    seen.append(rows.tolist())
    for rows in second:
        seen.append(rows.tolist())
    rows = next(batches)
    seen.append(rows.tolist())
    return seen


def changed_settings() -> Any:
    """Change what workers begin with."""
    global SIZE
    torch.set_default_dtype(torch.float64)
    seen = list[Any]()
    for _ in range(2):
        loader = DataLoader(Plain(), batch_size=4, shuffle=True, num_workers=2, collate_fn=put_noise)
        for x in loader:
            seen.append(x.tolist())
        SIZE += 1
    torch.set_default_dtype(torch.float32)
    SIZE = 1.0
    return seen


class Plain(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


with fsspec.open("memory://snapshots/numbers.parquet", "wb") as file:
    parquet.write_table(pyarrow.table({"x": np.arange(90.0).reshape(-1, 3).tolist()}), file, row_group_size=7)


def table() -> Any:
    """Read a table in an order of its own, which counts epochs."""
    data = ParquetDataset("memory://snapshots/numbers.parquet")
    loader, seen = DataLoader(data, batch_sampler=data.batches(4, shuffle=True), num_workers=2), list[Any]()
    for _ in range(3):
        for rows in loader:
            seen.append(rows["x"].tolist())
    return seen, torch.rand(1).item()


EXACT = (own_generators, counting, persistent, streamed)
"""Programs that go on from all of their batches."""
RARELY_RUN = (augmented, late_generators, hidden, noisy_batches, samplers, several, changed_settings, table)
"""More programs that go on from all of their batches."""


def unordered() -> Any:
    for _ in DataLoader(Rows(), batch_size=2, num_workers=2, in_order=False):
        pass


def persistent_counting() -> Any:
    """Have workers count from pass to pass."""
    loader = DataLoader(Counting(), batch_size=4, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for _ in loader:
            pass


def persistent_stream() -> Any:
    loader = DataLoader(Stream(), batch_size=4, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for _ in loader:
            pass


def changed_data() -> Any:
    """Change the data set that workers have got."""
    data = Counting()
    for x in DataLoader(data, batch_size=4, num_workers=2):
        data.count += len(x)


def broken() -> Any:
    """Go on behind a batch that cannot be made."""
    batches = iter(DataLoader(Broken(), batch_size=1, num_workers=1))
    with contextlib.suppress(ValueError):
        next(batches)
    for _ in batches:
        pass


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 0:
            raise ValueError(index)
        return index


REFUSED = {
    unordered: "in_order=False",
    persistent_counting: "persistent workers of a loader have changed their Counting",
    persistent_stream: "have read an iterable data set before",
    changed_data: "has changed a Counting since the workers",
    broken: "could not be made",
}
"""Programs that cannot go on from some batches, and a part of the reason."""
