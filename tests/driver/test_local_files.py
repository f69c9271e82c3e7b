"""Files of a run with ``launcher="local"``, to the end of its processes and after."""

from __future__ import annotations

import atexit
import dataclasses
import errno
import os
import re
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from tests.disk.test_rank_disks import tree


def config(world_size: int) -> TorchDistributedConfig:
    return TorchDistributedConfig(world_size=world_size, launcher="local")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3)), 2])  # as on two
def test_files_are_written_once_also_at_exit_and_by_threads(folder: Path, world_size: int) -> None:
    def append(name: str) -> None:
        with open(name, "a") as file:
            file.write("once\n")

    def train() -> list[str]:
        atexit.register(append, "at exit.txt")
        thread = threading.Thread(target=append, args=("by a thread.txt",))
        thread.start()
        thread.join()
        append("log.txt")
        return sorted(os.listdir())

    result = experiment.lagom(train, config(world_size))
    assert result.per_rank == (["by a thread.txt", "log.txt"],) * world_size
    assert tree(folder) == dict.fromkeys(("at exit.txt", "by a thread.txt", "log.txt"), b"once\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_named_with_the_rank_whose_it_is(rank: int) -> None:
    def train() -> None:
        if lagom.rank() == rank:
            with open("/dev/full", "w") as file:
                file.write("more than there is room for")

    with pytest.raises(OSError, match="No space left on device") as caught:
        experiment.lagom(train, config(2))
    assert caught.value.errno == errno.ENOSPC
    text = str(caught.value)
    assert f"a disk of rank {rank} on {socket.gethostname()} is full" in text
    assert re.search(rf"temporary files: {re.escape(tempfile.gettempdir())}, [\d,]+ MB of [\d,]+ left", text)
    assert ("only rank 0 writes to the program's own" in text) == (rank == 1)


def test_what_one_rank_writes_on_purpose_is_there_afterwards(folder: Path) -> None:
    def train() -> None:
        Path("common.txt").write_text(str(lagom.rank()))
        Path(f"rank{lagom.rank()}.txt").write_text("")

    experiment.lagom(train, config(3))
    assert tree(folder) == {"common.txt": b"0"} | {f"rank{rank}.txt": b"" for rank in range(3)}


def test_what_a_killed_rank_wrote_on_purpose_is_there_afterwards(folder: Path) -> None:
    def train() -> None:
        if lagom.rank() == 1:
            Path("last words.txt").write_text("by 1")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(RankError, match="SIGKILL"):
        experiment.lagom(train, dataclasses.replace(config(2), max_failures=0))
    assert tree(folder) == {"last words.txt": b"by 1"}


def test_a_second_run_finds_what_the_first_has_left(folder: Path) -> None:
    def train() -> str:
        with open("log.txt", "a") as file:
            file.write("once\n")
        return Path("log.txt").read_text()

    for run in (1, 2):
        assert experiment.lagom(train, config(2)).per_rank == ("once\n" * run,) * 2
