"""Ranks that a slot forks before their trial is known: trials are the same, and none is left or lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom.config import TorchDistributedConfig
from lagom.extensions.search.on_rank.messages import SlotJoin
from lagom.extensions.search.slots.choose_slots import choose_slots
from lagom.extensions.search.trial_loop import TrialLoop
from lagom.launch import choose
from lagom.on_rank.resource_usage import children
from lagom.plan import plan
from lagom.program.signature import Call
from lagom.wire.messages import LocalEvent, Message
from tests.extensions.search.test_trial_loop import ListSource, run
from tests.imported_once import imported_once  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
_WAIT_S = 20.0


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def others(number: int) -> list[int]:
    """Return the other processes that this one's slot has forked, once there are so many."""
    deadline = time.monotonic() + _WAIT_S
    while len(found := [pid for pid in children(os.getppid()) if pid != os.getpid()]) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def is_over(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_trial_that_was_forked_while_another_ran_finds_the_same_process(tmp_path: Path) -> None:
    def train(number: Any) -> Any:
        found = {
            "cwd": os.getcwd(),
            "files": os.listdir(),
            "environment": sorted(os.environ.items()),
            "random": torch.rand(1).item(),
            "dtype": str(torch.get_default_dtype()),
            "threads": torch.get_num_threads(),
            "limit": sys.getrecursionlimit(),
        }
        others(1)
        Path("left.txt").write_text(str(number))
        Path("folder").mkdir()
        os.chdir("folder")
        os.environ["LEFT"] = str(number)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        sys.setrecursionlimit(5000)
        return {"loss": number, "found": found}

    outcomes = run(train, ListSource([{"number": number} for number in range(4)]), tmp_path, slots=1)
    for name, first in outcomes[0].returned["found"].items():
        for number in range(1, 4):
            assert outcomes[number].returned["found"][name] == first, (name, number)
    assert outcomes[0].returned["found"]["files"] == []


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])  # the last of two is killed
def test_a_rank_that_is_killed_while_it_waits_costs_no_trial(tmp_path: Path, ranks: int) -> None:
    def train(number: Any) -> Any:
        waiting = others(2 * ranks - 1)
        if number == 1:
            os.kill(max(waiting), signal.SIGKILL)  # the last that was forked
            assert wait_until(lambda: is_over(max(waiting)))
        return {"loss": number, "waiting": waiting}

    source = ListSource([{"number": number} for number in range(4)])
    outcomes = run(train, source, tmp_path, slots=1, ranks=ranks, max_failed=1)
    assert [outcomes[number].value for number in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert len({max(outcomes[number].returned["waiting"]) for number in range(4)}) == 4


def test_the_end_of_a_search_leaves_no_rank_that_waits(tmp_path: Path) -> None:
    def train(number: Any) -> Any:
        return {"loss": number, "pids": [os.getppid(), os.getpid(), *others(1)]}

    outcomes = run(train, ListSource([{"number": number} for number in range(4)]), tmp_path, slots=2)
    pids = {pid for outcome in outcomes.values() for pid in outcome.returned["pids"]}
    assert len(pids) > 4
    assert wait_until(lambda: all(map(is_over, pids)))


def test_what_a_trial_has_left_running_ends_with_it_and_not_with_those_that_wait(tmp_path: Path) -> None:
    def train(number: Any) -> Any:
        marker, waiting = Path("/dev/shm", f"lagom-test-{os.getppid()}"), others(1)  # devices are real for every trial
        if number == 1:  # after the first, a slot may import libraries, and fork again
            left = subprocess.Popen(["sleep", "100"], start_new_session=True).pid
            marker.write_text(str(left))
            return {"loss": number, "waiting": waiting}
        if number == 0:
            return number
        left = int(marker.read_text())
        marker.unlink()
        return {"loss": float(wait_until(lambda: is_over(left))), "own": os.getpid()}

    outcomes = run(train, ListSource([{"number": number} for number in range(3)]), tmp_path, slots=1)
    assert [outcomes[number].value for number in range(3)] == [0.0, 1.0, 1.0]
    assert outcomes[1].returned["waiting"] == [outcomes[2].returned["own"]]


class SlotsWithGpus:
    """Slots whose tasks have two GPUs together, as those of a Spark cluster with one GPU a task."""

    def __init__(self, slots: Any) -> None:
        self._slots = slots
        self.send = slots.send

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        def with_gpus(slot: int, message: Message | LocalEvent) -> None:
            take(slot, dataclasses.replace(message, gpus=["3", "5"]) if isinstance(message, SlotJoin) else message)

        self._slots.serve(with_gpus, timeout_s)


def test_ranks_that_wait_get_their_gpus_with_their_trial(tmp_path: Path) -> None:
    def train() -> float:
        return float(os.environ["CUDA_VISIBLE_DEVICES"])

    config = TorchDistributedConfig(world_size=2, launcher="local", run_dir=None)
    where = choose("local")
    of_trial = dataclasses.replace(plan(config, where.cluster()), searches=True, keeps_logs=False)
    call = Call(function=train, provided={"hparams": {}})
    source = ListSource([{}] * 2)
    with choose_slots(where, of_trial, call, 1) as slots:
        TrialLoop(source, of_trial, "loss", 1, tmp_path / "trials").run(SlotsWithGpus(slots))  # type: ignore[arg-type]
    assert [outcome.value for outcome in source.outcomes.values()] == [4.0] * 2  # the mean of both ranks
