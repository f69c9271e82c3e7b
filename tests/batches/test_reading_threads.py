"""Loaders that are read in threads of the program's: their batches are those of one process, and nothing hangs."""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, WeightedRandomSampler

from lagom import experiment
from lagom.batches.reading_threads import Publication
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Batches
from lagom.errors import LagomError
from lagom.session.session import Session
from tests.ranks import alone, run_ranks
from tests.session.loading import Nondeterministic, Numbers, Shuffled, flat


class Drawn:
    """A sampler of the program's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count).tolist()


class DrawnAtOnce(Drawn):
    def __iter__(self) -> Iterator[int]:
        found: list[int] = torch.randperm(self.count).tolist()
        return iter(found)


class InBackground:
    """Iterates in a thread, some batches ahead."""

    def __init__(self, batches: Any, ahead: int = 3) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(ahead)
        self._batches = batches
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_until_it_waits(self) -> None:
        """Wait until the thread waits for room for its next batch, or has ended."""
        while self._thread.is_alive() and not self._queue.not_full._waiters:  # type: ignore[attr-defined]
            time.sleep(0.0005)

    def _read(self) -> None:
        try:
            for batch in self._batches:
                self._queue.put((batch, None))
            self._queue.put((None, StopIteration()))
        except Exception as error:
            self._queue.put((None, error))

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch, error = self._queue.get()
            if isinstance(error, StopIteration):
                self._thread.join()
                return
            if error is not None:
                raise error
            yield batch


def samples(batch: Any) -> list[int]:
    found: list[int] = (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()
    return found


def each_kind(count: int = 13, size: int = 4) -> dict[str, Callable[[], DataLoader[Any]]]:
    data = Numbers(count)
    return {
        "shuffle": lambda: DataLoader(data, size, shuffle=True),
        "own": lambda: DataLoader(data, size, sampler=Drawn(count)),
        "subset": lambda: DataLoader(data, size, sampler=SubsetRandomSampler(range(count))),
        "weighted": lambda: DataLoader(data, size, sampler=WeightedRandomSampler([1.0] * count, count)),
        "own batches": lambda: DataLoader(data, batch_sampler=[list(range(size))[::-1], list(range(2, 2 + size))]),
        "generator": lambda: DataLoader(data, size, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "stream": lambda: DataLoader(Shuffled(count), size),
        "workers": lambda: DataLoader(data, size, sampler=DrawnAtOnce(count), num_workers=1),
    }


def trained(count: int, size: int, begins_in_thread: bool) -> Any:
    """Batches of two epochs of each kind, and what a model comes to that is trained with them."""
    found = {}
    for name, make in each_kind(count, size).items():
        model = torch.nn.Linear(1, 1).double()
        loader, seen = make(), []
        for _ in range(2):
            for batch in InBackground(loader if begins_in_thread else iter(loader)):
                inputs = (batch[0] if isinstance(batch, list) else batch).double().unsqueeze(1) / 13
                model.zero_grad()
                ((model(inputs) - 3 * inputs) ** 2).mean().backward()
                torch.optim.SGD(model.parameters(), 0.1).step()
                seen.append(samples(batch))
        found[name] = seen, [p.item() for p in model.parameters()]
    return found


@pytest.mark.parametrize(
    ("batches", "world_size"),
    [
        ("split", 2),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in (("split", 3), ("whole", 2), ("whole", 3))),
    ],
)
def test_batches_read_in_a_thread_are_those_of_one_process(batches: Batches, world_size: int) -> None:
    # With "split", shares of one size: those of batches that were read ahead and changed cannot be told apart.
    sizes = (13, 4) if batches == "whole" else (12, 6)

    def run(session: Session) -> Any:
        return trained(*sizes, False), trained(*sizes, True)

    plain, ranks = alone(run), run_ranks(world_size, run, batches=batches)
    for wanted, *found in zip(plain, *ranks, strict=True):
        for name, (steps, weights) in wanted.items():
            for k, step in enumerate(steps):
                mine = [rank[name][0][k] for rank in found]
                if batches == "whole":
                    assert mine == [step] * world_size, name
                else:
                    assert flat([mine]) == sorted(step), name
            assert [rank[name][1] for rank in found] == [pytest.approx(weights, abs=1e-12)] * world_size, name


def test_ranks_agree_on_batches_while_the_main_thread_draws_as_well() -> None:
    """The order depends on the threads, as in one process; but each sample is used once."""

    def run(session: Session) -> Any:
        drop, model, seen = torch.nn.Dropout(0.5), torch.nn.Linear(1, 1), []
        loaders = [make() for make in (each_kind()[name] for name in ("shuffle", "weighted", "subset"))]

        def read() -> Iterator[Any]:
            for _ in range(4):
                for loader in loaders:
                    yield from loader

        reading = InBackground(read(), ahead=1)
        for batch in reading:
            # Rank 0 has to see in the first four batches that both threads draw: none of these draws falls into a read.
            reading.wait_until_it_waits() if session.rank == 0 else time.sleep(0.001)
            model(drop(batch.float().unsqueeze(1))).mean().backward()
            seen.append(batch.tolist())
        return seen

    first, second = run_ranks(2, run, batches="whole")
    assert first == second
    without_weighted = [batch for k, batch in enumerate(first) if k // 4 % 3 != 1]
    assert flat([without_weighted]) == sorted(list(range(13)) * 8)


@pytest.mark.soak  # the two tests above train on batches of threads
def test_a_thread_that_reads_several_epochs_draws_as_in_one_process_while_models_are_looked_at() -> None:
    def run(session: Session) -> Any:
        found = []
        for name in ("stream", "own", "shuffle", "workers"):

            def read(name: str = name) -> Iterator[Any]:
                loader = each_kind(24)[name]()
                for _ in range(2):
                    yield from loader

            model = torch.nn.Linear(1, 1).double()
            for batch in InBackground(read()):
                numbers = samples(batch)
                model(torch.tensor(numbers).double().unsqueeze(1)).mean().backward()
                found.append(numbers)
        return found, torch.rand(()).item(), random.random(), np.random.rand()

    plain = alone(run)
    assert run_ranks(2, run, batches="whole") == [plain, plain]


@pytest.mark.soak  # test_two_threads_read_loaders_of_one_kind has this sampler
def test_the_order_of_a_sampler_read_in_a_thread_is_that_of_rank_0() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Numbers(9), 2, sampler=Nondeterministic(9))
        found = [[batch.tolist() for batch in InBackground(begun)] for begun in (loader, iter(loader))]
        with ThreadPoolExecutor(2) as pool:  # each batch in the next free thread
            batches = iter(loader)
            found.append([pool.submit(next, batches).result().tolist() for _ in range(5)])
        return found

    first, *others = run_ranks(3, run, batches="whole")
    assert others == [first, first]
    assert [flat([epoch]) for epoch in first] == [list(range(9))] * 3


def test_what_a_sampler_raises_in_a_thread_is_raised_on_all_ranks() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Numbers(9), 2, sampler=Nondeterministic(9, fail_at=5 if session.rank == 0 else 7))
        seen: list[Any] = []
        with pytest.raises(KeyError, match="no more"):
            seen.extend(batch.tolist() for batch in InBackground(loader))
        return len(seen)

    assert run_ranks(2, run, batches="whole") == [2, 2]


def test_what_ranks_of_one_host_publish_does_not_stay_on_its_disk() -> None:
    def run(session: Session) -> Any:
        publication, texts = (
            Publication(session, "a loader"),
            [bytes(range(256)) * 2000, b"in a file", b"", b"x" * 5000],
        )
        same = [publication.agree(text if session.rank == 0 else b"") == text for text in texts * 4]
        assert session.group is not None
        session.group.barrier()
        return same, sum(file.stat().st_size for file in session.host_dir.rglob("*") if file.is_file())

    for same, num_bytes in run_ranks(3, run, batches="whole"):
        assert same == [True] * 16
        assert num_bytes < 100_000


def test_two_threads_read_loaders_of_one_kind() -> None:
    def run(session: Session) -> Any:
        def pairs() -> list[Any]:
            loaders = [DataLoader(Numbers(40), 4, sampler=Nondeterministic(40)) for _ in range(2)]
            return list(zip(*(map(samples, InBackground(loader)) for loader in loaders), strict=True))

        return pairs()

    first, second = run_ranks(2, run, batches="whole")
    assert first == second


def test_passes_in_threads_that_cannot_be_told_apart_are_an_error() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Numbers(400), 4, sampler=Nondeterministic(400))
        first, second = InBackground(loader, 1), None
        next(iter(first))
        second = InBackground(loader, 1)
        with pytest.raises(LagomError, match="make one for each thread"):
            next(iter(second))
        return True

    assert run_ranks(2, run, batches="whole") == [True, True]


def _waits_in_vain(hparams: dict[str, Any]) -> None:
    ready: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        for batch in DataLoader(Numbers(8), 2, sampler=Drawn(8)):
            ready.put(batch)
            if hparams["broken"]:
                raise ValueError("no such file")
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    while ready.get() is not None:
        pass


def _leaves_a_thread_reading() -> int:
    """Return while its thread still has batches to read."""
    ready: queue.Queue[Any] = queue.Queue(1)

    def read() -> None:
        while True:
            for batch in DataLoader(Numbers(8), 2, sampler=Drawn(8)):
                ready.put(batch)

    threading.Thread(target=read, daemon=True).start()
    return sum(int(ready.get().sum()) for _ in range(8))


def test_a_thread_that_still_reads_when_the_program_has_ended_is_no_failure() -> None:
    config = TorchDistributedConfig(world_size=2, launcher="local", run_dir=None)
    assert list(experiment.lagom(_leaves_a_thread_reading, config).per_rank) == [56, 56]


def test_an_error_in_a_thread_that_reads_a_loader_ends_the_run() -> None:
    config = TorchDistributedConfig(hparams={"broken": False}, world_size=2, launcher="local", run_dir=None)
    experiment.lagom(_waits_in_vain, config)
    with pytest.raises(ValueError, match="no such file"):
        experiment.lagom(_waits_in_vain, dataclasses.replace(config, hparams={"broken": True}))


def test_generators_of_the_main_thread_are_the_same_on_all_ranks_after_uneven_batches_in_a_thread() -> None:
    def run(session: Session) -> Any:
        for batch in InBackground(DataLoader(Numbers(9), 4, shuffle=True)):
            torch.rand(3), random.random(), np.random.rand()
            assert len(batch) <= 2
        list(DataLoader(Numbers(3), 3))
        return torch.rand(1).item(), random.random(), np.random.rand()

    first, second = run_ranks(2, run, batches="split")
    assert first == second


class ReadsMeanwhile(Dataset[torch.Tensor]):
    """The text of a sampler's error; where it is asked for, a thread begins to read a sample, and goes on when told."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self._is_reading = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __str__(self) -> str:
        self._thread.start()
        self._is_reading.wait()
        return "no more"

    def finish(self) -> None:
        self.go_on.set()
        if not self._is_reading.is_set():  # on ranks that do not tell others of the error
            self._thread.start()
        self._thread.join()

    def _read(self) -> None:
        list(DataLoader(self, batch_size=2))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        found = torch.rand(1)
        self._is_reading.set()
        self.go_on.wait()
        return found


def test_generators_sent_with_an_order_are_not_those_of_a_thread_that_reads_meanwhile() -> None:
    def run(session: Session) -> Any:
        text = ReadsMeanwhile()

        def order() -> Iterator[int]:
            yield from torch.randperm(4).tolist()
            raise ValueError(text)

        with pytest.raises(ValueError):  # noqa: PT011  # a match would ask for the text once more
            list(DataLoader(Numbers(4), batch_size=2, sampler=order()))
        text.finish()
        return torch.rand(1).item(), random.random(), np.random.rand()

    first, second = run_ranks(2, run)
    assert first == second
