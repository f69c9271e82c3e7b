"""Runs on Spark that lose a rank, a Python worker or an executor restart, with the slots that are there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.on_rank.resource_usage import children
from lagom.spark.spark_session import ClassicFacts
from tests.driver import losses
from tests.driver.file_programs import from_checkpoint
from tests.integration import hosts, programs


def run(tmp_path: Path, gates: Path, world_size: int, **settings: Any) -> Any:
    config: dict[str, Any] = {"launcher": "spark", "run_dir": tmp_path / "runs", "seed": 3, **settings}
    hparams = {"gates": str(gates)}
    return experiment.lagom(losses.train, TorchDistributedConfig(world_size=world_size, hparams=hparams, **config))


@pytest.mark.soak  # tests/driver/test_attempts.py shows it by default
@pytest.mark.parametrize(
    ("spark", "world_size", "victim"),
    [("local[2]", 2, 0), ("local[4]", 2, 1), ("local[4]", 3, 1)],
    indirect=["spark"],
    scope="session",
)
def test_a_killed_rank_changes_neither_weights_nor_output(
    spark: Any, tmp_path: Path, world_size: int, victim: int, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    wanted = run(tmp_path / "wanted", gate, world_size).value
    text = capfd.readouterr().out
    with losses.killed([Path(f"{gate}-1")], losses.kill_rank(victim, tmp_path / "runs")):
        result = run(tmp_path, gate, world_size)
    assert capfd.readouterr().out == text
    assert losses.same(result.value, wanted)
    (failure,) = result.failures
    assert failure["rank"] == victim


@pytest.mark.soak  # tests/driver/test_local.py kills both by default, and test_failing.py a worker of Spark
@pytest.mark.parametrize("killed", ["worker", "fork server"])
@pytest.mark.parametrize("spark", ["local[2]", "standalone"], indirect=True, scope="session")
def test_a_process_of_the_executor_that_is_killed_is_replaced(spark: Any, killed: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wanted = run(tmp_path / "wanted", gate, 2).value

    def kill() -> None:
        rank = losses.ranks(tmp_path / "runs")["1"]["pid"]
        worker = children(programs.daemon_of(rank))[0]
        os.kill(worker if killed == "worker" else parent(parent(rank)), signal.SIGKILL)

    with losses.killed([Path(f"{gate}-1")], kill):
        result = run(tmp_path, gate, 2)
    assert losses.same(result.value, wanted)
    assert len(result.failures) == 1


@pytest.mark.soak  # tests/driver/test_attempt_files.py shows it by default
@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_a_program_with_a_checkpoint_goes_on_from_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, runs = str(tmp_path / "gate"), tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    config = TorchDistributedConfig(world_size=2, launcher="spark", run_dir=runs, hparams={"gate": gate})
    with losses.killed([Path(f"{gate}-2")], losses.kill_rank(0, runs)):
        result = experiment.lagom(from_checkpoint, config)
    assert result.value == 2
    assert Path("steady.log").read_text() == "begun\nepoch 0\nepoch 1\nepoch 2\nepoch 3\n"
    assert result.failures[0]["resumed_from"] == str(tmp_path / "last.pt")


@pytest.mark.soak  # tests/driver/test_attempts.py shows the numbers of ranks by default
@pytest.mark.parametrize("spark", ["standalone"], indirect=True, scope="session")
def test_without_an_executor_the_run_goes_on_with_fewer_ranks(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    slots = ClassicFacts.slots_again

    def once_spark_knows(facts: ClassicFacts, wanted: int, wait_s: float, cut_off: frozenset[str]) -> int:
        losses.wait_for(lambda: slots(facts, wanted) < wanted)
        return 1

    def kill() -> None:
        os.kill(executor_of_rank_1(tmp_path), signal.SIGKILL)

    monkeypatch.setattr(ClassicFacts, "slots_again", once_spark_knows)
    with losses.killed([Path(f"{gate}-1")], kill):
        result = run(tmp_path, gate, 2)
    check_one_rank_went_on(result, tmp_path, capfd.readouterr().err)


@pytest.mark.soak  # tests/driver/test_attempts.py shows the numbers of ranks by default
@pytest.mark.parametrize("spark", ["standalone"], indirect=True, scope="session")
def test_an_executor_that_is_killed_is_replaced(spark: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with losses.killed([Path(f"{gate}-1")], lambda: os.kill(executor_of_rank_1(tmp_path), signal.SIGKILL)):
        result = run(tmp_path, gate, 2)
    world_size = len(result.per_rank)  # 1 on a machine so busy that a new executor takes more than seconds
    assert losses.same(result.value, run(tmp_path / "wanted", gate, world_size, launcher="local").value)
    assert len(result.failures) == 1


@pytest.mark.soak  # as above
@pytest.mark.parametrize("spark", ["dwindling"], indirect=True, scope="session")
def test_without_a_worker_of_sparks_the_run_goes_on_with_fewer_ranks(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"

    def kill() -> None:
        worker = parent(executor_of_rank_1(tmp_path))
        assert b"deploy.worker.Worker" in Path(f"/proc/{worker}/cmdline").read_bytes()
        os.kill(worker, signal.SIGKILL)

    with losses.killed([Path(f"{gate}-1")], kill):
        result = run(tmp_path, gate, 2)
    check_one_rank_went_on(result, tmp_path, capfd.readouterr().err)


@pytest.mark.soak  # as above
@pytest.mark.parametrize("spark", ["unplugged"], indirect=True, scope="session")
def test_without_a_host_the_run_goes_on_before_spark_misses_it(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate, alone = tmp_path / "gate", ""

    def cut_off() -> None:
        nonlocal alone
        on = [rank["host"] for rank in losses.ranks(tmp_path / "runs").values()]
        (alone,) = (host for host in on if on.count(host) == 1)
        hosts.ip(f"-n {alone} link set eth0 down")

    with losses.killed([Path(f"{gate}-1")], cut_off):
        result = run(tmp_path, gate, 3)
    hosts.ip(f"-n {alone} link set eth0 up")
    assert len(result.per_rank) == 2
    assert losses.same(result.value, run(tmp_path / "wanted", gate, 2, launcher="local").value)
    (failure,) = result.failures
    assert "no sign of life came for 20 s from the machine that held rank" in failure["cause"]
    assert failure["seconds_lost"] < 60  # Spark itself waits for two minutes
    assert "the run restarts, attempt 2 of 4, with 2 ranks instead of 3" in capfd.readouterr().err


def check_one_rank_went_on(result: Any, folder: Path, said: str) -> None:
    """Check that a run of two ranks has ended with one, with what that gives by itself."""
    assert len(result.per_rank) == 1
    assert losses.same(result.value, run(folder / "wanted", folder / "gate", 1, launcher="local").value)
    assert len(result.failures) == 1
    assert "the run restarts, attempt 2 of 4, with 1 rank instead of 2" in said


def executor_of_rank_1(folder: Path) -> int:
    """Return the JVM of the executor that holds rank 1."""
    return executor_of(losses.ranks(folder / "runs")["1"]["pid"])


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def executor_of(rank: int) -> int:
    """Return the JVM of a rank's executor."""
    return parent(programs.daemon_of(rank))
