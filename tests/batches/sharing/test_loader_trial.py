"""``lagom.batches.sharing.loader_trial``: workers are shared by default where nobody can tell, and nowhere else."""

from __future__ import annotations

import functools
import http.server
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lagom
from lagom import cli
from lagom.disk import asked_for_rank
from lagom.errors import LagomError
from lagom.exchange.native import native
from lagom.session.session import Session
from lagom.world import Place, place_set, rank_calls_reported
from tests.ranks import alone, run_ranks
from tests.session.loading import Numbers, WorkerSharded

pytestmark = [
    pytest.mark.skipif(native() is None, reason="without the compiled part each rank has workers of its own"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def num_workers() -> int:
    """Return the number of running workers of this process."""
    return len(multiprocessing.active_children())


def read_counting(loader: DataLoader[Any]) -> tuple[list[Any], int]:
    """Return the batches of a pass, and how many workers this process had at its last batch."""
    found = []
    for batch in loader:
        found.append(batch)
        running = num_workers()
    return found, running


again = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    "make",
    [
        again(lambda: DataLoader(Numbers(40), 2, num_workers=1)),
        lambda: DataLoader(WorkerSharded(60), 2, num_workers=2, persistent_workers=True),
        again(lambda: DataLoader(Numbers(40), 2, num_workers=2, persistent_workers=True)),
        again(lambda: DataLoader(WorkerSharded(60), 2, num_workers=2)),
        again(lambda: DataLoader([*range(40)], 2, num_workers=2)),  # type: ignore[arg-type]
        lambda: DataLoader(Numbers(20), 2, num_workers=1, multiprocessing_context="forkserver"),
        again(lambda: DataLoader(Numbers(20), 2, num_workers=2, multiprocessing_context="spawn")),
    ],
)
def test_after_its_first_batches_a_loader_has_the_workers_of_one_process(make: Callable[[], Any]) -> None:
    def read(session: Session) -> tuple[list[int], list[int]]:
        loader = make()
        passes = [read_counting(loader) for _ in range(2)]
        return [batch.tolist() for found, _ in passes for batch in found], [running for _, running in passes]

    wanted, _ = alone(read)
    (first, running), (second, absent) = run_ranks(2, read, batches="whole", collectives="auto")
    assert (first, second) == (wanted, wanted)
    assert all(running)
    assert absent == [0, 0]


def test_the_next_loader_of_the_same_data_set_begins_with_shared_workers() -> None:
    def read(session: Session) -> list[int]:
        dataset, running = Numbers(12), []
        for _ in range(3):
            batches = iter(DataLoader(dataset, 2, num_workers=1, collate_fn=lambda samples: samples))
            next(batches)
            running.append(num_workers())
            list(batches)
        return running

    assert run_ranks(2, read, batches="whole", collectives="auto") == [[1, 1, 1], [1, 0, 0]]


@functools.cache
def count_sample(index: int) -> int:
    count.value += 1
    return index


count = multiprocessing.Value("i", lock=False)


class Counting(Numbers):
    def __getitem__(self, index: int) -> int:
        return count_sample(index)


class Writing(Numbers):
    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        (self.folder / str(index)).touch()
        return index


class SharingByName(Numbers):
    def __init__(self, count: int, name: str) -> None:
        super().__init__(count)
        self.name = name

    def __getitem__(self, index: int) -> int:
        memory = SharedMemory(self.name)
        held: Any = memory.buf
        held[index] = 1
        del held
        memory.close()
        return index


class Signalling(Numbers):
    def __getitem__(self, index: int) -> int:
        os.kill(os.getppid(), signal.SIGUSR2)
        time.sleep(0.02)
        return index


class Starting(Numbers):
    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        subprocess.run(["touch", self.folder / str(index)], check=True)
        return index


def pass_over(dataset: Any, **options: Any) -> int:
    """Read two passes over ``dataset``; return the number of this process's workers at the end of the second."""
    loader = DataLoader(dataset, 1, num_workers=1, **options)
    return [read_counting(loader)[1] for _ in range(2)][1]


def counts_in_memory_that_no_search_finds(session: Session, folder: Path) -> tuple[Any, int]:
    count.value = 0
    running = pass_over(Counting(12))
    return count.value >= 12, running


def writes_files_that_the_program_reads(session: Session, folder: Path) -> tuple[Any, int]:
    before = sorted(path.name for path in folder.iterdir())
    for name in before:
        (folder / name).unlink()
    running = pass_over(Writing(12, folder))
    return sorted(path.name for path in folder.iterdir()), running


def writes_files_in_workers_that_are_started_anew(session: Session, folder: Path) -> tuple[Any, int]:
    return None, pass_over(Writing(12, folder), multiprocessing_context="spawn")


def finds_shared_memory_by_its_name(session: Session, folder: Path) -> tuple[Any, int]:
    memory = SharedMemory(create=True, size=12)
    running = pass_over(SharingByName(12, memory.name))
    held: Any = memory.buf
    found = bytes(held)
    del held
    memory.close()
    memory.unlink()
    return found[:12], running


def signals_its_parent(session: Session, folder: Path) -> tuple[Any, int]:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    running = pass_over(Signalling(12))
    signal.signal(signal.SIGUSR2, before)
    return bool(heard), running


def starts_programs(session: Session, folder: Path) -> tuple[Any, int]:
    return None, pass_over(Starting(12, folder))


class View(Numbers):
    numbers = torch.arange(100_000.0)

    def __getitem__(self, index: int) -> Any:
        return self.numbers[index : index + 2]


def first_of(samples: list[Any]) -> Any:
    return samples[0]


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def has_batches_of_unknown_kinds(session: Session, folder: Path) -> tuple[Any, int]:
    loader = DataLoader(Numbers(12), 1, num_workers=1, collate_fn=lambda samples: Slotted(samples[0]))
    passes = [read_counting(loader) for _ in range(2)]
    return [one.number for one in passes[1][0]], passes[1][1]


def has_small_parts_of_large_tensors(session: Session, folder: Path) -> tuple[Any, int]:
    loader = DataLoader(View(12), 1, num_workers=2, collate_fn=first_of)
    passes = [read_counting(loader) for _ in range(2)]
    return [one.tolist() for one in passes[1][0]], passes[1][1]


def has_tensors_that_workers_send_again(session: Session, folder: Path) -> tuple[Any, int]:
    found, running = [], 0
    loader = DataLoader(View(12), batch_size=None, sampler=[0] * 12, num_workers=1)
    for _ in range(2):
        for batch in loader:
            found.append(batch.mul_(2))
            running = num_workers()
    return [one.tolist() for one in found], running


def has_an_alarm(session: Session, folder: Path) -> tuple[Any, int]:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    running = pass_over(Numbers(12))
    signal.signal(signal.SIGALRM, before)
    return None, running


@pytest.mark.parametrize(
    "program",
    [
        counts_in_memory_that_no_search_finds,
        writes_files_that_the_program_reads,
        writes_files_in_workers_that_are_started_anew,
        again(finds_shared_memory_by_its_name),
        again(signals_its_parent),
        again(starts_programs),
        has_batches_of_unknown_kinds,
        again(has_small_parts_of_large_tensors),
        again(has_tensors_that_workers_send_again),
        again(has_an_alarm),
    ],
)
def test_each_rank_keeps_its_workers_where_the_program(program: Callable[..., Any], tmp_path: Path) -> None:
    def run(session: Session) -> Any:
        return program(session, tmp_path)

    wanted = alone(run)
    assert run_ranks(2, run, batches="whole", collectives="auto") == [wanted] * 2


class ByRank(Numbers):
    """Samples that depend on the rank, from the sample ``first`` on."""

    def __init__(self, count: int, first: int) -> None:
        super().__init__(count)
        self.first = first

    def __getitem__(self, index: int) -> int:
        return index + 100 * lagom.rank() if index >= self.first else index


@contextmanager
def _placed(session: Session) -> Iterator[None]:
    with rank_calls_reported(asked_for_rank), place_set(Place(session.rank, session.world_size)):
        yield


def test_workers_may_ask_for_their_rank() -> None:
    def read(session: Session) -> list[int]:
        with _placed(session):
            loader = DataLoader(ByRank(16, 0), 1, num_workers=1)
            return [batch.item() for _ in range(2) for batch in loader]

    mine = [*range(16)] * 2
    assert run_ranks(2, read, batches="whole", collectives="auto") == [mine, [100 + number for number in mine]]


def test_a_late_question_for_the_rank_is_an_error_on_all_ranks() -> None:
    def read(session: Session) -> str:
        with _placed(session), pytest.raises(LagomError) as raised:
            list(DataLoader(ByRank(40, 30), 1, num_workers=2))
        return str(raised.value)

    first, second = run_ranks(2, read, batches="whole", collectives="auto")
    assert first == second
    assert "asked for its rank" in first


def test_the_program_may_ask_for_its_rank_and_read_on_one_rank() -> None:
    def read(session: Session) -> list[int]:
        with _placed(session):
            batches = iter(DataLoader(Numbers(16), 1, num_workers=2))
            found = [next(batches).item()]
            return [*found, *(batch.item() for batch in batches)] if lagom.rank() == 1 else found

    assert run_ranks(2, read, batches="whole", collectives="auto") == [[0], [*range(16)]]


def test_files_that_workers_begin_to_write_end_the_sharing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Late(Writing):
        def __getitem__(self, index: int) -> int:
            return super().__getitem__(index) if index == 30 else index

    def read(session: Session) -> tuple[list[int], bool]:
        loader = DataLoader(Late(40, tmp_path), 1, num_workers=2)
        running = [read_counting(loader)[1] for _ in range(2)]
        return running, any("begun to change files" in text for text in session.said)

    assert run_ranks(2, read, batches="whole", collectives="auto") == [([2, 2], True), ([0, 2], False)]
    assert (tmp_path / "30").exists()


@pytest.mark.soak  # test_worker_sharing.py counts what workers have loaded
def test_workers_remember_what_those_of_one_process_do() -> None:
    class Remembering(Numbers):
        num_loaded = 0

        def __getitem__(self, index: int) -> Any:
            worker = get_worker_info()
            assert worker is not None
            self.num_loaded += 1
            return index, self.num_loaded, worker.id

    def read(session: Session) -> list[Any]:
        loader = DataLoader(Remembering(30), 2, True, num_workers=2, persistent_workers=True)
        return [torch.stack(batch).tolist() for _ in range(3) for batch in loader]

    assert run_ranks(2, read, batches="whole") == [alone(read)] * 2


SCRIPT = """
import dataclasses, enum, os, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Kind(enum.Enum):
    EVEN, ODD = range(2)

@dataclasses.dataclass
class Batch:
    numbers: torch.Tensor
    kind: Kind

class BrokenError(Exception):
    pass

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 38:
            raise BrokenError("38")
        return index

def collate(samples):
    return Batch(torch.tensor(samples), Kind(samples[0] % 2))

def train():
    found = []
    for epoch in range(2):
        try:
            for batch in DataLoader(Numbers(), 1, num_workers=2, collate_fn=collate):
                found.append((isinstance(batch, Batch), batch.kind is Kind.ODD, batch.numbers.tolist()))
        except BrokenError:
            found.append("broken")
    return found
"""
HERE = "print(train())"
CALL = """
if __name__ == "__main__":
    from lagom import experiment
    from lagom.config import TorchDistributedConfig
    config = TorchDistributedConfig(world_size=2, launcher="local")
    plain = train()
    print(plain)
    print(all(found == plain for found in experiment.lagom(train, config).per_rank))
"""


@pytest.mark.soak
def test_batches_of_classes_of_a_script_have_these_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + CALL)
    done = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True, timeout=100)
    plain, *_, alike = done.stdout.splitlines()
    assert alike == "True"
    script.write_text(SCRIPT + HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["run", "-n", "2", str(script)]) == 0
    assert capfd.readouterr().out == f"{plain}\n"


def test_nested_tensors_come_as_they_are() -> None:
    def read(session: Session) -> list[Any]:
        def collate(samples: list[int]) -> torch.Tensor:
            return torch.nested.nested_tensor([torch.ones(number + 1) for number in samples])

        loader = DataLoader(Numbers(24), 2, num_workers=1, collate_fn=collate)
        return [[one.tolist() for one in batch.unbind()] for _ in range(2) for batch in loader]

    assert run_ranks(2, read, batches="whole") == [alone(read)] * 2


@pytest.mark.soak
def test_arrays_come_as_they_are() -> None:
    def read(session: Session) -> list[Any]:
        def collate(samples: list[int]) -> Any:
            return np.array(samples, dtype=np.float32), [np.full((3, 3), samples[0])] * 2

        found = []
        for _ in range(2):
            for array, (first, second) in DataLoader(Numbers(24), 2, num_workers=2, collate_fn=collate):
                first += 1
                found.append((array.tolist(), array.flags.owndata, array.flags.writeable, second.tolist()))
        return found

    assert run_ranks(2, read, batches="whole") == [alone(read)] * 2


def test_a_stream_that_the_program_feeds_batch_by_batch_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lagom.batches.sharing.loader_trial.DRAIN_S", 0.3)

    def read(session: Session) -> list[float]:
        folder = tmp_path / str(session.rank if session.world_size > 1 else "alone")
        folder.mkdir()

        def feed(number: int, value: float) -> None:
            (folder / "partial").write_text(str(value))
            (folder / "partial").rename(folder / str(number))

        feed(0, 1.0)
        found = []
        for number, batch in enumerate(DataLoader(Fed(folder), batch_size=None, num_workers=1)):
            found.append(batch.item())
            feed(number + 1, batch.item() * 2 if number < 8 else -1.0)
        return found

    wanted = alone(read)
    assert run_ranks(2, read, batches="whole", collectives="auto") == [wanted, wanted]


class Fed(IterableDataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while True:
            path = self.folder / str(number)
            while not path.exists():
                time.sleep(0.005)
            if (value := float(path.read_text())) < 0:
                return
            yield torch.tensor(value)
            number += 1


@pytest.mark.soak  # the test above has batches under way when workers become shared
def test_batches_that_the_program_never_asks_for_run_into_no_timeout() -> None:
    def read(session: Session) -> list[int]:
        found: list[int] = []
        for batch in DataLoader(SlowAtTheEnd(40), 4, num_workers=2, timeout=1.5):
            found += batch.tolist()
            if len(found) == 24:
                break
        return found

    assert run_ranks(2, read, batches="whole", collectives="auto") == [[*range(24)]] * 2


class SlowAtTheEnd(Numbers):
    def __getitem__(self, index: int) -> int:
        if index >= 28:
            time.sleep(2.5)
        return index


def test_workers_that_reach_a_server_of_the_program_are_each_ranks_own() -> None:
    def read(session: Session) -> int:
        seen: list[str] = []

        class Server(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            list(DataLoader(Asking(48, f"http://127.0.0.1:{server.server_address[1]}"), 4, num_workers=2))
            server.shutdown()
            thread.join()
        return len(seen)

    assert run_ranks(2, read, batches="whole", collectives="auto") == [48, 48]


class Asking(Numbers):
    def __init__(self, count: int, url: str) -> None:
        super().__init__(count)
        self.url = url

    def __getitem__(self, index: int) -> int:
        urllib.request.urlopen(f"{self.url}/{index}").read()
        return index
