"""``lagom.disk.saving``: saves whole, downloads once per host."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
import urllib.request
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from lagom.session.session import Session
from tests.ranks import alone, run_ranks


def test_each_rank_reads_back_what_it_saved_and_the_file_is_rank_0s(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run(session: Session) -> Any:
        values = []
        for number in range(3):
            torch.save({"number": number, "by": session.rank}, path)
            values.append(torch.load(path)["number"])
            values.append(torch.load(path, mmap=True)["by"])
        return values

    assert run_ranks(3, run) == [[0, rank, 1, rank, 2, rank] for rank in range(3)]
    assert os.listdir(tmp_path) == ["model.pt"]
    assert torch.load(path) == {"number": 2, "by": 0}


@pytest.mark.parametrize("name", ["model.pt", "módel.pt"])
def test_a_saved_file_has_the_bytes_of_a_plain_save(name: str, tmp_path: Path) -> None:
    value = {"weight": torch.arange(10.0)}

    def run(_: Session) -> bytes:
        torch.save(value, tmp_path / name)
        return (tmp_path / name).read_bytes()

    plain = alone(run)
    assert run_ranks(2, run) == [plain, plain]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("by_method", [False, True])
def test_torchscript_is_read_back_as_each_rank_has_saved_it(by_method: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")

    def run(session: Session) -> list[float]:
        found = []
        for number in range(5):
            model = torch.jit.script(torch.nn.Linear(100, 100))
            torch.nn.init.constant_(model.weight, 10 * number + session.rank)
            if by_method:
                model.save(path)
            else:
                torch.jit.save(model, path)
            found.append(torch.jit.load(path).weight.mean().item())
        return found

    assert run_ranks(3, run) == [[10.0 * number + rank for number in range(5)] for rank in range(3)]
    assert os.listdir(tmp_path) == ["model.pt"]
    assert torch.jit.load(path).weight.mean().item() == 40


def test_a_failed_save_raises_on_every_rank_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run(session: Session) -> Any:
        torch.save(1, path)
        try:
            torch.save(lambda: 0, path)
        except (AttributeError, pickle.PicklingError) as error:
            return type(error).__name__

    assert len(set(run_ranks(2, run))) == 1
    assert torch.load(path) == 1
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("is_temporary", [False, True])
def test_a_failed_save_leaves_each_ranks_file_as_it_was(is_temporary: bool, tmp_path: Path) -> None:
    def run(session: Session) -> Any:
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) if is_temporary else tmp_path
        torch.save(session.rank, folder / "old.pt")
        for name in ("old.pt", "new.pt"):
            with pytest.raises((AttributeError, pickle.PicklingError)):
                torch.save([torch.zeros(100), lambda: 0], folder / name)
        return torch.load(folder / "old.pt"), (folder / "new.pt").exists(), os.listdir(folder)

    assert run_ranks(2, run) == [(rank, False, ["old.pt"]) for rank in range(2)]


def test_a_save_to_nowhere_is_refused_as_torch_does(tmp_path: Path) -> None:
    def run(_: Session) -> list[str]:
        os.chdir(tmp_path)
        refusals = []
        for name in ("no/model.pt", str(tmp_path), str(tmp_path / "no" / "model.pt")):
            with pytest.raises(RuntimeError) as caught:
                torch.save(1, name)
            refusals.append(str(caught.value).splitlines()[0])
        return refusals

    plain = alone(run)
    assert run_ranks(2, run) == [plain, plain]


class Meeting:
    """Its pickling waits for another thread that pickles."""

    def __init__(self, threads: threading.Barrier) -> None:
        self._threads = threads

    def __reduce__(self) -> Any:
        self._threads.wait()
        return OrderedDict, ()


def test_threads_save_to_one_path_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run(_: Session) -> Any:
        value = Meeting(threading.Barrier(2, timeout=60))
        with ThreadPoolExecutor(2) as pool:
            for saved in [pool.submit(torch.save, value, path) for _ in range(2)]:
                saved.result()
        return torch.load(path), os.listdir(tmp_path)

    assert run_ranks(2, run) == [({}, ["model.pt"])] * 2


class Killing:
    """Its pickling ends the process at once."""

    def __reduce__(self) -> Any:
        os._exit(0)


def test_a_run_saves_where_another_of_its_pid_was_killed(tmp_path: Path) -> None:
    """As in containers, in each of which the numbers of processes begin anew."""
    path = tmp_path / "model.pt"

    def run(_: Session) -> Any:
        with mock.patch.object(os, "getpid", return_value=os.getpid()):
            if (child := os.fork()) == 0:
                torch.save(Killing(), path)
            os.waitpid(child, 0)
            torch.save(7, path)
        return torch.load(path)

    assert run_ranks(2, run) == [7, 7]


def test_a_path_with_a_long_name_is_saved(tmp_path: Path) -> None:
    path = tmp_path / ("x" * os.pathconf(tmp_path, "PC_NAME_MAX"))

    def run(_: Session) -> Any:
        torch.save(7, path)
        return torch.load(path)

    assert run_ranks(2, run) == [7, 7]


def test_mapped_files_are_each_ranks_own(tmp_path: Path) -> None:
    def run(session: Session) -> Any:
        path = str(tmp_path / "numbers")
        torch.full((4,), float(session.rank)).numpy().tofile(path)
        if session.group is not None:
            session.group.barrier()
        mapped = torch.from_file(path, shared=True, size=4)
        mapped += 1
        return numpy.fromfile(path, dtype=numpy.float32).tolist()

    assert run_ranks(2, run) == [[1.0] * 4, [2.0] * 4]
    assert numpy.fromfile(tmp_path / "numbers", dtype=numpy.float32).tolist() == [1.0] * 4


class Downloaded(Dataset[int]):
    def __init__(self, root: Path, download: bool = False, dataset: str = "MNIST") -> None:
        self.fetched = False
        if download and not (root / "data").exists():
            time.sleep(0.1)
            assert not (root / "data").exists()
            (root / "data").write_text("x")
            self.fetched = True


def test_a_data_set_is_downloaded_by_one_rank(tmp_path: Path) -> None:
    def run(_: Session) -> Any:
        class Later(Downloaded):
            def __init__(self, root: Path, **options: Any) -> None:
                super().__init__(root, **options)

        (tmp_path / "later").mkdir(exist_ok=True)
        Downloaded(tmp_path)
        return Downloaded(tmp_path, download=True, dataset="CIFAR10").fetched, Later(
            tmp_path / "later", download=True
        ).fetched

    found = run_ranks(3, run)
    assert sorted(first for first, _ in found) == [False, False, True]
    assert sorted(second for _, second in found) == [False, False, True]


@pytest.mark.soak  # tests/driver/test_local_files.py has files of threads by default
def test_threads_look_at_files_while_others_are_written(tmp_path: Path) -> None:
    (tmp_path / "there").touch()

    def run(session: Session) -> None:
        def look() -> None:
            for _ in range(2000):
                os.stat(f"{tmp_path}/there")  # a str, which is looked up the short way
                os.path.exists(f"{tmp_path}/file 3")

        with ThreadPoolExecutor(2) as pool:
            looking = [pool.submit(look) for _ in range(2)]
            for number in range(100):
                path = tmp_path / f"file {number}"
                path.write_text(f"{number} of {session.rank}")
                assert path.read_text() == f"{number} of {session.rank}"
            for one in looking:
                one.result()

    run_ranks(2, run)


def test_a_url_is_retrieved_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("content")

    def run(_: Session) -> Any:
        name, headers = urllib.request.urlretrieve(source.as_uri(), tmp_path / "copy")
        written = os.stat(name).st_mtime_ns
        time.sleep(0.1)
        return str(name), headers["Content-length"], written == os.stat(name).st_mtime_ns

    assert run_ranks(2, run) == [(str(tmp_path / "copy"), "7", True)] * 2
