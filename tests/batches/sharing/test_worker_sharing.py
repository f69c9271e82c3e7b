"""``lagom.batches.sharing``: one set of workers for all ranks, whose batches are those of one plain process."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lagom.disk.install import asked_for_rank
from lagom.errors import DivergenceError, LagomError
from lagom.exchange.native import native
from lagom.session.session import Session
from tests.ranks import alone, run_ranks
from tests.session.loading import Broken, Nondeterministic, Numbers, OwnLoader, Unseeded, WorkerSharded

pytestmark = [
    pytest.mark.skipif(native() is None, reason="without the compiled part each rank has workers of its own"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

Row = namedtuple("Row", ["picture", "name"])


class Augmented(Numbers):
    """Pictures whose numbers depend on every generator, on the worker, and on what it has loaded before."""

    def __init__(self, count: int, shape: tuple[int, ...] = (3, 40, 40)) -> None:
        super().__init__(count)
        self.shape = shape
        self.num_loaded = 0
        self.seeded = -1

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None
        self.num_loaded += 1
        picture = torch.full(self.shape, float(index)) + torch.rand(())
        numbers = self.num_loaded, worker.id, worker.seed % 2**32, random.random(), np.random.rand(), self.seeded
        return picture, index, np.array(numbers)  # few tensors: each takes a file of shared memory


def seed_worker(number: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    np.random.seed((number + torch.initial_seed()) % 2**32)
    worker.dataset.seeded = number  # type: ignore[attr-defined]


class Sample:
    """An object that only a program's own collate function makes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def take_first(samples: list[Any]) -> Any:
    return samples[0]


def collate_anything(samples: list[Any]) -> Any:
    pictures = torch.stack([sample[0] for sample in samples])
    arrays = pictures.numpy().astype(np.float64)
    names = [f"picture {sample[1]}" for sample in samples]
    return {
        "row": Row(pictures, names),
        "views": (pictures[:1], pictures.transpose(0, 1), pictures[::2]),
        "arrays": [arrays, np.asfortranarray(arrays[0, 0]), np.array(["a", None], dtype=object), np.float32(3)],
        "objects": (None, {Sample(3).number: Sample(4)}, b"bytes", 1 + 2j, slice(3), torch.float16),
        "sparse": torch.eye(3).to_sparse(),
        "empty": [torch.empty(0, 3), np.empty(0), [], torch.tensor(5)],
        "trained": pictures[0].clone().requires_grad_(),
    }


def collate_unlike(samples: list[Any]) -> Any:
    """Make batches that can be compared, and later others."""
    return Sample(samples[0][1]) if samples[0][1] > 20 else default_collate(samples)


def as_plain(value: Any) -> Any:
    """Return ``value`` with the bytes of tensors and arrays, so that results of ranks can be compared exactly."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return "tensor", str(value.dtype), value.requires_grad, strides, as_plain(value.detach().to_dense().numpy())
    if isinstance(value, np.ndarray):
        numbers = value.tolist() if value.dtype.hasobject else value.tobytes()
        return "array", str(value.dtype), value.shape, value.strides, numbers
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [as_plain(item) for item in value]
    return value


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "1 worker": lambda: DataLoader(Augmented(9), 4, True, num_workers=1),
    "2 workers": lambda: DataLoader(Augmented(9), 4, True, num_workers=2, worker_init_fn=seed_worker),
    "3 workers, more than batches": lambda: DataLoader(Augmented(5), 4, num_workers=3, drop_last=True),
    "3 workers, generator": lambda: DataLoader(
        Augmented(20), 3, True, num_workers=3, generator=torch.Generator().manual_seed(3)
    ),
    "persistent": lambda: DataLoader(Augmented(9), 2, True, num_workers=2, persistent_workers=True),
    "prefetch": lambda: DataLoader(Augmented(9), 1, num_workers=1, prefetch_factor=5),
    "large batches": lambda: DataLoader(Augmented(9, (3, 200, 200)), 3, num_workers=1, multiprocessing_context="fork"),
    "anything": lambda: DataLoader(Augmented(9), 4, num_workers=1, collate_fn=collate_anything),
    "long": lambda: DataLoader(Augmented(40, (3,)), 2, True, num_workers=2),
    "long, with unlike batches": lambda: DataLoader(Augmented(40, (3,)), 1, num_workers=2, collate_fn=collate_unlike),
    "long, persistent": lambda: DataLoader(Augmented(40, (3,)), 1, True, num_workers=3, persistent_workers=True),
    "long stream": lambda: DataLoader(WorkerSharded(60), 2, num_workers=2),
    "samples": lambda: DataLoader(Augmented(5), batch_size=None, num_workers=1),
    "own sampler": lambda: DataLoader(Augmented(9), 4, num_workers=1, sampler=random.sample(range(9), 7)),
    "own loader": lambda: OwnLoader(Augmented(9), 4, num_workers=1),
    "parts of a stream": lambda: DataLoader(WorkerSharded(23), 4, num_workers=3),
    "stream that goes on": lambda: DataLoader(WorkerSharded(23), 4, num_workers=2, persistent_workers=True),
    "stream without batches": lambda: DataLoader(WorkerSharded(7), batch_size=None, num_workers=2),
}


# With "auto" a loader has workers of each rank at first: tests/batches/sharing/test_loader_trial.py shows what then
# follows, and test_batches_are_those_of_one_process each kind of loader.
EITHER = pytest.mark.parametrize("share_loading", [True, pytest.param("auto", marks=pytest.mark.soak)])


def check_equal(function: Callable[[Session], Any], *share_loading: Any, world_size: int = 2) -> None:
    """Check that ``function`` returns exactly what it returns in one plain process, with each of ``share_loading``."""
    wanted = alone(function)
    for share in share_loading:
        for found in run_ranks(world_size, function, batches="whole", share_loading=share):
            assert found == wanted, share


USUAL = ("2 workers", "anything", "long, with unlike batches")
STREAMS = ("stream without batches",)
"""Loaders that are read by default; all others in a soak.

test_dataloader.py has loaders of a class of the program's own by default, test_loader_trial.py persistent workers and a
long stream, and test_each_rank_may_change_its_batches large batches.
"""


def _two_epochs(session: Session, loaders: Iterable[str]) -> Any:
    found = []
    for name in loaders:
        loader = LOADERS[name]()
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found.append((name, [as_plain(batch) for batch in loader], torch.rand(()).item()))
    return found


@pytest.mark.parametrize(
    ("world_size", "share_loading", "loaders"),
    [
        (2, "auto", (*USUAL, *STREAMS)),
        pytest.param(2, "auto", tuple(LOADERS), marks=pytest.mark.soak),
        # test_loaders_may_be_left_early_and_read_together has two ranks take batches from rank 0.
        pytest.param(3, "auto", tuple(LOADERS), marks=pytest.mark.soak),
        pytest.param(2, True, tuple(LOADERS), marks=pytest.mark.soak),
    ],
    ids=["usual", "all", "three ranks", "shared"],
)
def test_batches_are_those_of_one_process(world_size: int, share_loading: Any, loaders: tuple[str, ...]) -> None:
    program = functools.partial(_two_epochs, loaders=loaders)
    wanted = alone(program)
    for found in run_ranks(world_size, program, batches="whole", share_loading=share_loading):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == theirs, ours[0]


@pytest.mark.soak  # the test above has the batches by default, and test_any_loader.py trains on those of workers
def test_a_model_trained_on_batches_of_workers_is_that_of_one_process() -> None:
    def train(session: Session) -> list[list[float]]:
        model = nn.Linear(48, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(Augmented(24, (48,)), 8, True, num_workers=2)
        for _ in range(2):
            for x, *_ in loader:
                optimizer.zero_grad()
                model(x.double().div_(10)).square().mean().backward()
                optimizer.step()
        return [p.tolist() for p in model.parameters()]

    for ours in run_ranks(2, train, batches="whole"):
        torch.testing.assert_close(ours, alone(train), rtol=0, atol=1e-12)


class Processes(Numbers):
    def __getitem__(self, index: int) -> int:
        return os.getpid()


def _num_processes(results: list[list[int]]) -> int:
    return len({number for numbers in results for number in numbers})


def _processes(session: Session, **options: Any) -> tuple[list[int], int]:
    batches = iter(DataLoader(Processes(12), 2, num_workers=3, **options))
    first = next(batches)
    running = len(multiprocessing.active_children())
    return [number for batch in (first, *batches) for number in batch.tolist()], running


@pytest.mark.soak  # test_loader_trial.py counts workers by default
def test_a_host_has_the_workers_of_one_process() -> None:
    kinds: list[dict[str, Any]] = [{}, {"in_order": False}, {"persistent_workers": True}]

    def read(session: Session) -> list[tuple[list[int], int]]:
        return [_processes(session, **options) for options in kinds]

    first, second = run_ranks(2, read, batches="whole", share_loading=True, collectives="auto")
    for options, mine, other in zip(kinds, first, second, strict=True):
        assert (mine[1], other[1]) == (3, 0), options
        assert mine[0] == other[0], options
        assert _num_processes([mine[0], other[0]]) == 3, options


@pytest.mark.soak
def test_each_rank_has_workers_of_its_own_where_ranks_may_see_other_batches() -> None:
    def knows_its_rank(session: Session) -> tuple[list[int], int]:
        asked_for_rank()
        return _processes(session)

    def evaluates(session: Session) -> tuple[list[int], int]:
        with torch.no_grad():
            return _processes(session)

    runs: list[tuple[Any, dict[str, Any]]] = [
        (knows_its_rank, {"batches": "whole"}),
        (_processes, {"batches": "split"}),
        (evaluates, {"evaluation": "replicated"}),
        (evaluates, {"evaluation": "sharded"}),
        (_processes, {"batches": "whole", "collectives": "gloo"}),
    ]
    for run, options in runs:
        numbers, running = zip(*run_ranks(2, run, share_loading=True, **options), strict=True)
        assert running == (3, 3), options
        assert _num_processes(list(numbers)) == 6, options


@EITHER
def test_each_rank_may_change_its_batches(share_loading: Any) -> None:
    def change(session: Session) -> list[float]:
        kept = []
        for picture, *_ in DataLoader(Augmented(12, (3, 200, 200)), 3, num_workers=2):
            time.sleep(0.05 * session.rank)
            picture.div_(255)
            kept.append(picture)
        return [picture.double().sum().item() for picture in kept]

    check_equal(change, share_loading)


@EITHER
def test_batches_are_aligned_in_memory_as_torch_aligns_them(share_loading: Any) -> None:
    def read(session: Session) -> list[tuple[int, int]]:
        return [
            (size, batch[0].data_ptr() % 64)
            for size in (4, 100, 400)
            for batch in DataLoader(Augmented(6, (size, size)), 3, num_workers=2)
        ]

    check_equal(read, share_loading)


@EITHER
def test_views_of_one_tensor_share_its_memory_on_all_ranks(share_loading: Any) -> None:
    class Parts(Numbers):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.numbers = torch.arange(100_000.0)

        def __getitem__(self, index: int) -> Any:
            return self.numbers[index : index + 10], self.numbers[index + 5 : index + 15]

    def read(session: Session) -> list[Any]:
        found = []
        for first, second in DataLoader(Parts(4), batch_size=1, num_workers=1, collate_fn=take_first):
            first.add_(100)
            found.append((as_plain(second), second.is_contiguous()))
        return found

    check_equal(read, share_loading)


@EITHER
def test_errors_of_samples_are_those_of_one_process_and_later_batches_come(share_loading: Any) -> None:
    def read(session: Session) -> list[Any]:
        batches = iter(DataLoader(Broken(8, 3), 2, num_workers=2))
        found = [next(batches).tolist()]
        with pytest.raises(KeyError) as raised:
            next(batches)
        return [*found, str(raised.value), *(batch.tolist() for batch in batches)]

    check_equal(read, share_loading)


def test_a_dead_worker_is_an_error_on_all_ranks() -> None:
    class Deadly(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    def read(session: Session) -> list[str]:
        found = []
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError) as raised:
                list(DataLoader(Deadly(20), 2, num_workers=2, collate_fn=list))
            found.append(str(raised.value))
        return found

    first, second = run_ranks(2, read, batches="whole", share_loading=True, collectives="auto")
    assert first == second
    assert all("DataLoader worker" in text for text in first)


@pytest.mark.soak  # the test above has an error of torch's loader by default
def test_a_slow_worker_is_an_error_on_all_ranks() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(30 * (index == 5))
            return index

    def read(session: Session) -> str:
        with pytest.raises(RuntimeError) as raised:
            list(DataLoader(Slow(20), 2, num_workers=2, timeout=1))
        return str(raised.value)

    assert (
        run_ranks(2, read, batches="whole", share_loading=True, collectives="auto")
        == ["DataLoader timed out after 1 seconds"] * 2
    )


@pytest.mark.soak
@EITHER
def test_loaders_may_be_left_early_and_read_together(share_loading: Any) -> None:
    def read(session: Session) -> list[Any]:
        first = DataLoader(Augmented(12, (2,)), 3, True, num_workers=2)
        second = DataLoader(Augmented(8, (2,)), 2, True, num_workers=1, persistent_workers=True)
        found: list[Any] = []
        for _ in range(2):
            for batch in first:
                found.append(as_plain(batch))
                if len(found) % 3 == 2:
                    break
            found += [as_plain(pair) for pair in zip(first, second, strict=False)]
            found += [as_plain(inner) for outer in second for inner in (outer, next(iter(first)))]
        return found

    check_equal(read, share_loading, world_size=3)


def test_all_ranks_follow_what_only_rank_0_has_drawn() -> None:
    def read(session: Session) -> Any:
        shuffled = DataLoader(Numbers(12), 3, sampler=Nondeterministic(12), num_workers=2)
        unordered = DataLoader(Numbers(12), 3, num_workers=3, in_order=False)
        stream = DataLoader(Unseeded(50), 8, num_workers=2)
        return [as_plain(list(loader)) for loader in (shuffled, unordered, stream)]

    first, second = run_ranks(2, read, batches="whole", share_loading=True, collectives="auto")
    assert first == second


@EITHER
def test_what_workers_tell_by_shared_memory_every_rank_hears(share_loading: Any) -> None:
    class Counting(Numbers):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.seen = torch.zeros(count).share_memory_()

        def __getitem__(self, index: int) -> int:
            self.seen[index] += 1
            return index

    def read(session: Session) -> list[float]:
        dataset = Counting(6)
        list(DataLoader(dataset, 2, num_workers=2))
        return [float(number) for number in dataset.seen]

    check_equal(read, share_loading)


def _read_in_threads(session: Session, num_in_main: int) -> list[Any]:
    found = []
    for options in ({}, {"persistent_workers": True}, {"sampler": list(range(7, 0, -1))}):
        loader: DataLoader[Any] = DataLoader(Augmented(12, (3, 40, 40)), 3, num_workers=2, **options)
        for _ in range(1 if "sampler" in options else 2):
            batches = iter(loader)
            found += [as_plain(next(batches)) for _ in range(num_in_main)]
            with ThreadPoolExecutor(1) as pool:
                later = pool.submit(list, batches)
                for batch in later.result():
                    batch[0].div_(255)
                    found.append(as_plain(batch))
    return found


@pytest.mark.parametrize("num_in_main", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_thread_reads_what_the_main_thread_has_begun(num_in_main: int) -> None:
    wanted = alone(lambda session: _read_in_threads(session, num_in_main))
    for found in run_ranks(2, lambda session: _read_in_threads(session, num_in_main), batches="whole"):
        assert found == wanted


def _read_alike(loader: DataLoader[Any]) -> list[Any]:
    return [as_plain(batch) for batch in loader]


@pytest.mark.soak
@EITHER
def test_a_thread_may_stop_in_mid_epoch_and_workers_then_start_late(share_loading: Any) -> None:
    def read(session: Session) -> list[Any]:
        loader = DataLoader(Augmented(24, (3,)), 2, True, num_workers=2)
        found = [_read_alike(loader) for _ in range(2)]  # from now on workers are shared with "auto" too
        for _ in range(2):
            batches, first, stop = iter(loader), list[Any](), threading.Event()

            def run(batches: Any = batches, first: list[Any] = first, stop: threading.Event = stop) -> None:
                for batch in batches:
                    first.append(batch)
                    stop.wait(0.02 * (1 + session.rank))
                    if stop.is_set():
                        return

            thread = threading.Thread(target=run)
            thread.start()
            while not first:
                time.sleep(0.01)
            stop.set()
            thread.join()
            found.append(as_plain(first[0]))
        return [*found, _read_alike(loader)]

    check_equal(read, share_loading)


def test_a_thread_cannot_go_on_where_ranks_share_loading() -> None:
    def read(session: Session) -> list[Any]:
        # Of two workers the second may be faster: then all ranks have its batch already, and a thread may take it.
        batches = iter(DataLoader(Numbers(12), 2, num_workers=1))
        next(batches)
        with ThreadPoolExecutor(1) as pool, pytest.raises(LagomError, match="share_loading=False"):
            pool.submit(next, batches).result()
        return [batch.tolist() for batch in batches]

    found = run_ranks(2, read, batches="whole", share_loading=True, collectives="auto")
    assert found == [[[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]] * 2


class Slow(Broken):
    def __getitem__(self, index: int) -> int:
        time.sleep(30 * (index == 5))
        return super().__getitem__(index)


@pytest.mark.soak  # test_errors_of_samples has such errors by default, and test_a_thread_reads threads
@pytest.mark.parametrize(
    ("data", "timeout"),
    [
        (Broken(6, 2), 0),
        # On a busy machine a worker may end first, with status 1. test_a_slow_worker shows a timeout without threads.
        (Slow(8, 3), 1),
    ],
    ids=["broken", "slow"],
)
def test_errors_in_a_thread_are_those_of_one_process(data: Broken, timeout: int) -> None:
    def read(session: Session) -> list[str]:
        batches = iter(DataLoader(data, 2, num_workers=1, timeout=timeout))
        with ThreadPoolExecutor(1) as pool:
            return [str(pool.submit(next, batches).exception()) for _ in range(3)]

    check_equal(read, "auto", True)


def test_a_rank_that_reads_no_batch_is_named() -> None:
    def read(session: Session) -> str:
        batches = iter(DataLoader(Numbers(12), 3, num_workers=1))
        next(batches)
        other = DataLoader(Numbers(12), 3)
        with pytest.raises(DivergenceError) as raised:
            iter(other) if session.rank else next(batches)
        return str(raised.value)

    for text in run_ranks(2, read, batches="whole", share_loading=True, collectives="auto"):
        assert "rank 0 at the next batch of a data loader with workers" in text


class Unsendable:
    """Object that unpickles as one that cannot be pickled."""

    def __reduce__(self) -> Any:
        return threading.Lock, ()


def collate_some(samples: list[int]) -> Any:
    return Unsendable() if 2 in samples else samples


def test_a_batch_that_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    def read(session: Session) -> list[Any]:
        batches = iter(DataLoader(Numbers(6), 2, num_workers=2, collate_fn=collate_some))
        found = [next(batches)]
        with pytest.raises(LagomError) as raised:
            next(batches)
        return [str(raised.value), *found, *batches]

    first, second = run_ranks(2, read, batches="whole", share_loading=True, collectives="auto")
    assert first == second
    assert "cannot be given to the other ranks" in first[0]
    assert first[1:] == [[0, 1], [4, 5]]


@pytest.mark.soak  # test_errors_of_samples has errors of workers by default
@EITHER
def test_a_stream_that_fails_in_its_worker_fails_on_all_ranks(share_loading: Any) -> None:
    class Failing(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            raise OSError(5, "the source is gone")

    def read(session: Session) -> list[Any]:
        found: list[Any] = []
        try:
            found.extend(
                batch.tolist() for batch in DataLoader(Failing(), 2, num_workers=2, collate_fn=default_collate)
            )
        except OSError as error:
            found.append(str(error).splitlines()[-1])
        return found

    check_equal(read, share_loading)
