"""SIGTERM in the process of the driver: forks, inline runs, the program's own handler, and runs that end anyway."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver.termination import softly_terminated
from lagom.errors import Terminated
from lagom.plan import Plan, plan
from tests.driver import losses

PATIENCE_S = 60.0
PLAN: Plan = plan(TorchDistributedConfig(world_size=1, run_dir=None), Cluster(launcher="local", slots=1))


def sleeping() -> None:
    """Wait longer than the test."""
    time.sleep(PATIENCE_S)


def end_of_terminated_fork() -> int | None:
    """Return how a fork ends that waits, and gets SIGTERM."""
    child = multiprocessing.get_context("fork").Process(target=sleeping)
    child.start()
    time.sleep(0.2)
    child.terminate()
    child.join(PATIENCE_S / 10)
    found = child.exitcode
    child.kill()
    child.join()
    return found


def test_sigterm_ends_the_forks_of_the_driver() -> None:
    with softly_terminated(PLAN):
        assert end_of_terminated_fork() == -signal.SIGTERM


def test_a_handler_that_the_program_sets_during_the_run_stays() -> None:
    def own(*_: Any) -> None:
        pass

    try:
        with softly_terminated(PLAN):
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_has_its_default_in_an_inline_run() -> None:
    threads = threading.active_count()

    def look() -> list[Any]:
        is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return [is_default, threading.active_count(), end_of_terminated_fork()]

    config = TorchDistributedConfig(launcher="inline", world_size=1, run_dir=None)
    assert experiment.lagom(look, config).value == [True, threads, -signal.SIGTERM]


def signalled(pause_s: float) -> tuple[list[str], Callable[[], bool]]:
    """Return what happens while ranks end of which SIGTERM comes again after ``pause_s``, and the function for it."""
    happened: list[str] = []

    def leave() -> bool:
        happened.append("leaves")
        time.sleep(pause_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        happened.append("has left")
        return True

    return happened, leave


ENDS = ["has left", "the run ends"]


def terminated(leave: Callable[[], bool], rest: Callable[[], Any]) -> None:
    """Run ``rest`` as a run that SIGTERM has told to end."""
    with softly_terminated(PLAN) as termination:
        termination.leave = leave
        os.kill(os.getpid(), signal.SIGTERM)
        rest()


@pytest.mark.parametrize(("pause_s", "is_waited_for"), [(0.05, True), (1.5, False)])
def test_a_second_sigterm_ends_the_run_at_once_unless_it_repeats_the_first(pause_s: float, is_waited_for: bool) -> None:
    happened, leave = signalled(pause_s)

    def wait() -> None:
        try:
            losses.wait_for(lambda: "has left" in happened)
        finally:
            happened.append("the run ends")

    with pytest.raises(Terminated):
        terminated(leave, wait)
    losses.wait_for(lambda: "has left" in happened)
    assert happened == ["leaves", *(ENDS if is_waited_for else ENDS[::-1])]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_without_ranks_ends_the_run_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(Terminated):
        terminated(lambda: False, sleeping)
    assert time.monotonic() - began < PATIENCE_S


def test_a_second_sigterm_does_not_leave_the_handler_behind() -> None:
    happened, leave = signalled(1.5)
    with pytest.raises(Terminated):
        terminated(leave, lambda: None)
    assert happened[0] == "leaves"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    losses.wait_for(lambda: "has left" in happened)  # the thread ends


def terminate_after(marker: Path) -> threading.Thread:
    """Send SIGTERM to this process when ``marker`` is there."""

    def send() -> None:
        losses.wait_for(marker.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_run_that_returns_before_its_last_snapshot_has_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(folder: str) -> int:
        Path(folder, "after the last batch").touch()
        time.sleep(1.0)
        with open(Path(folder, "results"), "a") as file:
            file.write("once ")
        return 7

    hparams = {"folder": str(tmp_path)}
    config = TorchDistributedConfig(
        launcher="local", world_size=1, snapshot_every_s=1000, run_dir=tmp_path / "runs", hparams=hparams
    )
    sender = terminate_after(tmp_path / "after the last batch")
    with pytest.raises(Terminated):
        experiment.lagom(train, config)
    sender.join()
    assert "ended by SIGTERM, after it had returned" in capsys.readouterr().err
    (run,) = (tmp_path / "runs").iterdir()
    assert experiment.resume(run).value == 7
    assert (tmp_path / "results").read_text() == "once "
