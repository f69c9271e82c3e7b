"""Files of a run with ``launcher="local"``, to the end of its processes and after."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from pathlib import Path

import pytest

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from tests.patching.test_disk import tree


def config(world_size: int) -> TorchDistributedConfig:
    return TorchDistributedConfig(world_size=world_size, launcher="local")


def append(name: str) -> None:
    with open(name, "a") as file:
        file.write("once\n")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_files_are_written_once_also_at_exit_and_by_threads(folder: Path, world_size: int) -> None:
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
        experiment.lagom(train, config(2))
    assert tree(folder) == {"last words.txt": b"by 1"}


def test_a_second_run_finds_what_the_first_has_left(folder: Path) -> None:
    def train() -> str:
        append("log.txt")
        return Path("log.txt").read_text()

    for run in (1, 2):
        assert experiment.lagom(train, config(2)).per_rank == ("once\n" * run,) * 2
