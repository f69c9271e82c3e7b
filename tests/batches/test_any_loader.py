"""Loaders of every kind against the plain run: each batch, and the weights after training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import alone, check_against_one_process, run_ranks
from tests.session.loading import Doubling, Endless, Numbers, OwnLoader, Stream, dealt, seen


class ByLength(Sampler[list[int]]):
    """A custom batch sampler: batches of different sizes, drawn with ``random`` and numpy."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(self.count).tolist()
        while order:
            size = random.randint(1, 4)
            yield order[:size]
            order = order[size:]


class Shuffling(Sampler[int]):
    """A sampler with a state like ``set_epoch``: every pass starts one later."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(number * 3 + self.epoch) % self.count for number in range(self.count)])

    def __len__(self) -> int:
        return self.count


class InBatches(Numbers):
    """A data set that fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 10 for index in indices]


class Lengthless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return -index


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def plus_one(samples: list[int]) -> Tensor:
    return torch.tensor(samples) + 1


ten = [3, 1, 4, 15, 92, 65, 35, 89, 79, 32]
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Numbers(10), batch_size=4),
    "batches of one": lambda: DataLoader(Numbers(3)),
    "shuffled": lambda: DataLoader(Numbers(10), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(Numbers(10), batch_size=4, shuffle=True, generator=seeded()),
    "drop last": lambda: DataLoader(Numbers(10), batch_size=4, shuffle=True, drop_last=True),
    "with replacement": lambda: DataLoader(
        Numbers(9), batch_size=4, sampler=RandomSampler(Numbers(9), replacement=True, num_samples=13)
    ),
    "weighted": lambda: DataLoader(
        Numbers(6), batch_size=4, sampler=WeightedRandomSampler([0.1, 1.0, 2.0, 3.0, 1.0, 1.0], 11)
    ),
    "weighted, generator": lambda: DataLoader(
        Numbers(3), batch_size=4, sampler=WeightedRandomSampler([1.0, 2.0, 3.0], 9, generator=seeded())
    ),
    "subset sampler": lambda: DataLoader(Numbers(20), batch_size=4, sampler=SubsetRandomSampler(range(3, 14))),
    "sampler of one's own": lambda: DataLoader(Numbers(11), batch_size=4, sampler=Shuffling(11)),
    "list of indices": lambda: DataLoader(Numbers(11), batch_size=3, sampler=[5, 5, 2, 7]),
    "batch sampler": lambda: DataLoader(
        Numbers(9), batch_sampler=BatchSampler(RandomSampler(Numbers(9)), 4, drop_last=False)
    ),
    "batch sampler of ranges": lambda: DataLoader(Numbers(9), batch_sampler=[range(4), range(4, 9)]),  # type: ignore[list-item]
    "batch sampler of one's own": lambda: DataLoader(Numbers(11), batch_sampler=ByLength(11)),
    "nested batch sampler": lambda: DataLoader(
        Numbers(9), batch_sampler=BatchSampler(Shuffling(9), 5, drop_last=False)
    ),
    "random_split": lambda: DataLoader(random_split(Numbers(20), [9, 11])[1], batch_size=4, shuffle=True),
    "random_split by parts": lambda: DataLoader(random_split(Numbers(10), [0.7, 0.3])[0], batch_size=4),
    "subset": lambda: DataLoader(Subset(Numbers(20), range(5, 15)), batch_size=4),
    "concatenated": lambda: DataLoader(ConcatDataset([Numbers(4), Numbers(3)]), batch_size=3, shuffle=True),
    "stacked": lambda: DataLoader(
        StackDataset(Numbers(7)), batch_size=4, collate_fn=lambda rows: torch.tensor([row[0] for row in rows])
    ),
    "list": lambda: DataLoader(ten, batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "range": lambda: DataLoader(range(7), batch_size=4),  # type: ignore[arg-type]
    "dict": lambda: DataLoader({i: i * i for i in range(7)}, batch_size=4),  # type: ignore[arg-type]
    "array": lambda: DataLoader(np.arange(7), batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "tensor": lambda: DataLoader(torch.arange(7), batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "fetched in batches": lambda: DataLoader(InBatches(7), batch_size=4, shuffle=True),
    "without a length": lambda: DataLoader(Lengthless(), batch_size=4, sampler=SequentialSampler(range(7))),
    "collate": lambda: DataLoader(Numbers(7), batch_size=4, collate_fn=plus_one),
    "subclass": lambda: OwnLoader(Numbers(7), batch_size=4, shuffle=True),
    "subclass with __iter__": lambda: Doubling(Numbers(7), batch_size=4, shuffle=True),
    "subclass with one iterator": lambda: Endless(Numbers(7), batch_size=4, shuffle=True),
    "worker": lambda: DataLoader(Numbers(10), batch_size=4, shuffle=True, num_workers=1, prefetch_factor=4),
    "workers": lambda: DataLoader(Numbers(10), batch_size=2, sampler=Shuffling(10), num_workers=2),
    "persistent workers": lambda: DataLoader(
        Numbers(10), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
}


AGAIN = (
    *("worker", "workers", "persistent workers"),
    *("weighted, generator", "subset sampler", "random_split by parts", "subset", "concatenated", "stacked"),
    *("range", "dict", "array"),
)
"""Loaders that show what others show; a model is trained on batches of persistent workers by default."""
NAMES = [pytest.param(name, marks=pytest.mark.soak) if name in AGAIN else name for name in LOADERS]


@cache
def plain_passes(again: bool) -> dict[str, Any]:
    found: dict[str, Any] = alone(lambda session: passes(session, again))
    return found


@cache
def passes_on_ranks(world_size: int, again: bool) -> list[dict[str, Any]]:
    return run_ranks(world_size, lambda session: passes(session, again))


def passes(session: Session, again: bool) -> dict[str, Any]:
    """Return the passes over each loader that is, or is not, in ``AGAIN``."""
    return {name: two_passes(make(), session) for name, make in LOADERS.items() if (name in AGAIN) == again}


def two_passes(loader: DataLoader[Any], session: Session) -> Any:
    """Return the batches of two whole passes, with unfinished ones between them, and the next random numbers."""
    seed_everything(0)
    found = [seen(loader, session)]
    next(iter(loader))
    for _ in loader:
        break
    found.append(seen(loader, session))
    return found, torch.rand(1).item(), random.random(), np.random.rand()


def check_dealt_out(results: list[Any], expected: Any) -> None:
    plain, *numbers = expected
    for epoch in range(2):
        assert len({len(result[0][epoch]) for result in results}) == 1
        for number, batch in enumerate(plain[epoch]):
            assert [result[0][epoch][number] for result in results] == dealt(batch, len(results))
    assert all(result[1:] == tuple(numbers) for result in results)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", NAMES)
def test_batches_are_those_of_one_machine_dealt_out(name: str, world_size: int) -> None:
    again = name in AGAIN
    check_dealt_out([found[name] for found in passes_on_ranks(world_size, again)], plain_passes(again)[name])


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_bit_identical(name: str) -> None:
    assert passes_on_ranks(1, name in AGAIN)[0][name] == plain_passes(name in AGAIN)[name]


# Such a worker imports torch, which takes seconds, so only rank 1 has one. For lagom both methods are the same.
@pytest.mark.soak  # a worker imports torch
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_started_anew_give_the_batches_of_one_machine(method: str) -> None:
    def run(session: Session) -> Any:
        context = method if session.rank == 1 else "fork"
        return two_passes(
            DataLoader(Numbers(10), 4, True, num_workers=1, multiprocessing_context=context, persistent_workers=True),
            session,
        )

    check_dealt_out(run_ranks(2, run), alone(run))


class Pairs(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 2, dtype=torch.float64)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "y": torch.sin(self.x[index, :1]), "name": str(index)}

    def __len__(self) -> int:
        return len(self.x)


TRAINED: dict[str, Callable[[], DataLoader[Any]]] = {
    "dict of tensors": lambda: DataLoader(Pairs(14), batch_size=5, shuffle=True),
    "weighted": lambda: DataLoader(Pairs(9), batch_size=4, sampler=WeightedRandomSampler([1.0] * 5 + [3.0] * 4, 13)),
    "batch sampler": lambda: DataLoader(Pairs(13), batch_sampler=ByLength(13)),
    "random_split": lambda: DataLoader(random_split(Pairs(15), [11, 4])[0], batch_size=4, shuffle=True),
    "persistent workers": lambda: DataLoader(
        Pairs(11), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
}


def train_on_all(_: Session) -> dict[str, list[Tensor]]:
    return {name: trained(make) for name, make in TRAINED.items()}


def trained(make: Callable[[], DataLoader[Any]]) -> list[Tensor]:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = make()
    for _epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
    return [part.detach() for part in model.state_dict().values()]


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3))])
def test_training_ends_with_the_weights_of_one_machine(world_size: int) -> None:
    check_against_one_process(train_on_all, world_size, atol=0 if world_size == 1 else 1e-12)


def test_len_under_per_rank_is_that_of_the_passes_a_loader_has_had() -> None:
    def run(session: Session) -> Any:
        training = DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
        evaluated = DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
        told = [len(training)]
        list(training)
        with torch.no_grad():
            told.append(len(training))
            list(evaluated)
        told.append(len(evaluated))  # gradients are on again
        list(evaluated)  # training and evaluation from now on
        told.append(len(evaluated))
        with torch.no_grad():
            told.append(len(evaluated))
        return told

    assert alone(run) == [6, 6, 6, 6, 6]
    assert run_ranks(2, run, batches="per_rank") == [[3, 3, 6, 3, 6]] * 2
    assert run_ranks(2, run) == [[6, 6, 6, 6, 6]] * 2


def nested(samples: list[int]) -> tuple[Tensor, Tensor]:
    """A nested tensor of one sequence for each sample, as long as the sample says, and a target for each."""
    rows = [torch.linspace(0, sample, 2 * (sample % 4 + 1), dtype=torch.float64).view(-1, 2) for sample in samples]
    return torch.nested.nested_tensor(rows), torch.tensor(samples, dtype=torch.float64)[:, None].sin()


class Sums(nn.Module):
    """Sums over nested sequences, whose rows have different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.nested.to_padded_tensor(self.first(x), 0.0).sum(1).tanh())
        return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("batches", ["split", "whole"])
@pytest.mark.parametrize(
    "make",
    [lambda: Numbers(11), pytest.param(lambda: Stream(11), marks=pytest.mark.soak)],
    ids=["samples", "stream"],
)
def test_nested_batches_train_as_on_one_machine(make: Any, batches: Any) -> None:
    def train(_: Session) -> list[Tensor]:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for x, y in DataLoader(make(), batch_size=4, collate_fn=nested):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return [part.detach() for part in model.state_dict().values()]

    check_against_one_process(train, 2, atol=1e-12, batches=batches)


def without_thirds(samples: list[Tensor]) -> Tensor | None:
    kept = [sample for sample in samples if int(sample[0]) % 3]
    return torch.stack(kept) if kept else None


def time_first(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples).T


@pytest.mark.parametrize("collate_fn", [None, time_first, without_thirds])
def test_samples_that_collate_leaves_out_are_told_of(collate_fn: Any) -> None:
    def program(session: Session) -> bool:
        rows = torch.arange(12.0)[:, None].expand(12, 2)
        for _ in DataLoader(TensorRows(rows), batch_size=6, collate_fn=collate_fn):
            pass
        return any("collate_fn leaves samples out" in line for line in session.said)

    assert run_ranks(2, program) == [collate_fn is without_thirds] * 2


class TensorRows(Dataset[Tensor]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


@pytest.mark.parametrize(
    ("batches", "always_slices", "is_told"),
    [("split", False, "whole"), ("per_rank", False, "whole"), ("whole", False, "split"), ("whole", True, "")],
)
def test_a_program_whose_batches_come_from_no_loader_is_told_that_nothing_is_shared_out(
    batches: Any, always_slices: bool, is_told: str
) -> None:
    """The message comes once and names the setting that would split the work; none where forwards are split."""

    def program(session: Session) -> list[str]:
        torch.manual_seed(1)
        x, model = torch.randn(48, 3), torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _epoch in range(2):
            order = torch.randperm(48)
            for i in range(0, 48, 8):
                optimizer.zero_grad()
                (model(x[order[i : i + 8]]) - 1).square().mean().backward()
                optimizer.step()
        with torch.no_grad():
            list(DataLoader(TensorDataset(x), batch_size=8))
        return [line for line in session.said if "nothing is shared out" in line]

    for lines in run_ranks(2, program, batches=batches, always_slices=always_slices):
        assert len(lines) == (is_told != "")
        assert all(f"batches='{is_told}'" in line for line in lines)


class BareLoader:
    """A loader of a library's own (fastai's) that torch's iterator reads: it has no samplers and no batch size."""

    _IterableDataset_len_called, _auto_collation, drop_last, in_order = None, False, False, True
    _index_sampler, generator, prefetch_factor, _dataset_kind = range(100), None, 2, _DatasetKind.Iterable
    pin_memory, pin_memory_device, num_workers, timeout, persistent_workers = False, "", 0, 0, False
    worker_init_fn = multiprocessing_context = None

    def __init__(self) -> None:
        self.collate_fn = lambda batch: batch
        self.dataset = self
        self.rows = torch.randn(11, 3)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows[torch.randperm(11)].split(4))


@pytest.mark.parametrize("batches", ["whole", "split"])
def test_a_librarys_own_loader_gives_every_rank_all_batches(batches: Any) -> None:
    def run(session: Session) -> Any:
        torch.manual_seed(1)
        loader: Any = BareLoader()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            for batch in _SingleProcessDataLoaderIter(loader):
                optimizer.zero_grad()
                model(batch).pow(2).mean().backward()
                optimizer.step()
        return [p.tolist() for p in model.parameters()]

    assert run_ranks(2, run, batches=batches) == [alone(run)] * 2
