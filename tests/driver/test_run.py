"""``lagom.driver.run``: what the driver makes of tasks that are cut off, stopped, gone, or do not answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lagom.driver.run
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver.run import RunView
from lagom.errors import RankError
from lagom.plan import Plan, plan
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.watch.progress import Progress
from tests.integration import hosts
from tests.restart.added_snapshot import add_snapshot

ROOT = Path(__file__).parents[2]
TASK = """
import json, os, socket, sys, time
from lagom.wire.snapshot_messages import SnapshotKept
from lagom.wire.client import dial
from lagom.wire.messages import CutOff, Done, Failed, Join, RankReport, Stop, Stopping, TaskHello, own_version

host, port, secret, task, answers = json.loads(sys.argv[1])
link = dial((host, port), bytes.fromhex(secret), TaskHello(task=task, version=own_version()), 20.0)
ranks = [2 * task, 2 * task + 1]
place = {"host": f"{socket.gethostname()}|{task}", "ip": host, "store": None, "gpus": [], "cores": 2}
link.send(Join(task=task, pid=os.getpid(), ranks=ranks, python="3", torch="2", **place))
while (message := link.receive(60.0)) is not None and not isinstance(message, Stop):
    print(message.tag, flush=True)
    if answers == "fails":
        link.send(SnapshotKept(number=1, at=0.0, place=[1, 1], bytes=1))
    if answers == "is cut off":
        link.send(CutOff(rank=2, peer=1, lost_s=20.0))
        # What the ranks of a connection that has ended say.
        link.send(Failed(report=RankReport(rank=3, ok=False, consequence=True, error="CollectiveError")))
if not answers:
    time.sleep(1000)
link.send(Stopping())
time.sleep(2.5)
error = {"error": "ValueError", "message": "for a rank was not there", "traceback": ""}
how = error if answers == "fails" else {"stopped": True}
link.send(Done(reports=[RankReport(rank=rank, ok=False, **how) for rank in ranks]))
"""
needs_hosts = pytest.mark.skipif(not hosts.allowed(), reason="no namespaces may be made here")


def plan_of(num_tasks: int) -> Plan:
    cluster = Cluster(launcher="spark", slots=num_tasks, gpus_per_slot=2)
    return plan(TorchDistributedConfig(world_size=2 * num_tasks), cluster)


@contextmanager
def run_with(
    tasks: list[tuple[list[str], bool | str]], address: str = "127.0.0.1", history: RunHistory | None = None
) -> Iterator[tuple[RunView, list[Any]]]:
    """A run whose tasks have all joined; and their processes.

    Args:
        tasks: for each task the begin of its command, and whether it answers; or "fails" if it keeps a snapshot, and
            fails when it is told to stop.
    """
    started: list[subprocess.Popen[str]] = []
    with RunView(plan_of(len(tasks)), "Spark", can_gather=False, history=history) as run:
        host, port = run.channel.listen(address, len(tasks))
        try:
            for number, (prefix, answers) in enumerate(tasks):
                told = json.dumps([host, port, run.channel.secret.hex(), number, answers])
                command = [*prefix, sys.executable, "-c", TASK, told]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            assert [process.stdout.readline() for process in started if process.stdout] == ["peers\n"] * len(tasks)
            yield run, started
        finally:
            for process in started:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


@needs_hosts
def test_a_machine_that_is_cut_off_is_named_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lagom.driver.run, "LOST_S", 7.0)
    with hosts.network(1) as (here, (there,)), run_with([([], True), (list(there.command), True)], here) as (run, _):
        there.cut_off()
        run.watch()
        said = capfd.readouterr().err
    assert said.count("s from the machine that holds ranks 2, 3 on lgh") == 1
    lost = run.lost()
    assert isinstance(lost, RankError)
    assert lost.rank == 2
    assert "no sign of life came for 7 s from the machine that held ranks 2, 3 on lgh" in str(lost)
    loss = run.loss()
    assert loss is not None
    assert there.name in loss.cut_off


@pytest.mark.soak  # tests/wire/test_peer_silence.py shows by default how a silence ends
@needs_hosts
def test_a_machine_that_comes_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts.network(1) as (here, (there,)), run_with([(list(there.command), True)], here) as (run, _):
        said: list[str] = []

        def hear(_: Progress, text: str) -> None:
            said.append(text)
            if "no sign of life for" in text:
                there.reconnect()
            else:
                run.stop()

        monkeypatch.setattr(Progress, "warn", hear)
        there.cut_off()
        run.watch()
    assert run.lost() is None
    assert len(said) == 2
    assert all("that holds ranks 0, 1 on" in text for text in said)
    assert "answers again" in said[1]


@pytest.mark.parametrize(
    ("slots", "kept"), [(2, 1), (0, 1), *(pytest.param(*other, marks=pytest.mark.soak) for other in ((-1, 1), (2, 2)))]
)
def test_an_attempt_ends_after_a_snapshot_if_there_are_slots_for_more_ranks(
    slots: int, kept: int, tmp_path: Path
) -> None:
    """What ranks raise when others have been ended for this is no failure of the program.

    Args:
        kept: number of the newest snapshot; the task tells of snapshot 1.
    """
    snapshots = SnapshotFolder(str(tmp_path / "snapshots"))
    snapshots.make()
    history = RunHistory(3, snapshots=snapshots)
    history.free_slots = lambda: slots
    add_snapshot(snapshots, kept)
    with run_with([([], "fails")], history=history) as (run, _):
        goes_on = slots <= 0 or kept == 2
        if goes_on:
            threading.Timer(1.0, run.stop).start()
        run.watch()
    loss = run.loss()
    if goes_on:
        assert loss is None
        assert [failure.rank for failure in run.failures()] == [0, 1]
        return
    assert loss is not None
    assert loss.free_slots == 2
    assert history.begins_again(loss)


@pytest.mark.soak  # tests/wire/test_peer_silence.py shows it by default
def test_a_process_that_is_stopped_is_not_a_machine_that_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    with run_with([([], True)]) as (run, (process,)):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(5.5)
        os.kill(process.pid, signal.SIGCONT)
        run.stop()
        run.watch()
    assert run.lost() is None
    assert "sign of life" not in capfd.readouterr().err


def test_tasks_that_answer_are_waited_for_and_others_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lagom.driver.run, "ANSWER_S", 2.0)
    with run_with([([], True), ([], False)]) as (run, _):
        run.stop()
        run.watch()
        assert sorted(run.reports) == [0, 1]  # which came later than the other should have answered


@pytest.mark.soak  # tests/integration/test_failing.py shows it by default
def test_a_process_that_is_gone_is_named_with_its_ranks_and_host() -> None:
    with run_with([([], True), ([], True)]) as (run, processes):
        processes[1].kill()
        run.watch()
    lost = run.lost()
    assert isinstance(lost, RankError)
    assert str(lost) == f"the process that held ranks 2, 3 on {os.uname().nodename} is gone, perhaps killed"
    assert lost.rank == 2


def test_ranks_that_do_not_reach_each_other_though_they_reach_the_driver_are_a_loss() -> None:
    with run_with([([], True), ([], "is cut off")]) as (run, _):
        run.watch()
    lost, loss, host = run.lost(), run.loss(), os.uname().nodename
    assert isinstance(lost, RankError)
    assert lost.rank == 1
    assert str(lost).startswith(f"no sign of life came for 20 s from rank 1 on {host} to rank 2 on {host}, while both")
    assert loss is not None
    assert (loss.rank, host in loss.cut_off) == (1, True)


def test_an_executor_that_only_spark_knows_to_be_lost_is_a_loss() -> None:
    with RunView(plan_of(2), "Spark", can_gather=False) as run:
        assert run.loss() is None
        run.lose_executor()
    assert str(run.lost()) == "Spark lost an executor"
    assert run.loss() is not None


@pytest.mark.parametrize(
    ("launcher", "said"), [("local", ""), ("spark", "waiting for there to start the tasks (0 of 2")]
)
def test_waiting_for_this_machine_is_no_alarm(
    launcher: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lagom.driver.run, "IMPATIENT_S", 0.1)
    cluster = Cluster(launcher=launcher, slots=2)
    with RunView(plan(TorchDistributedConfig(world_size=2), cluster), "there", can_gather=False) as run:
        timer = threading.Timer(1.0, run.finish)
        timer.start()
        run.watch()
        timer.join()
    found = capfd.readouterr().err
    assert said in found
    assert bool(said) == bool(found)
