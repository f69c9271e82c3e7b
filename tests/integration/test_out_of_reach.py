"""Executors that cannot reach the driver: everything goes through Spark's job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lagom
import lagom.driver.run
import lagom.spark.spark
import lagom.spark.spark_session
from lagom.errors import LagomError, RankError
from lagom.spark import spark_task
from lagom.wire.server import DriverServer
from tests.integration import programs

pytestmark = pytest.mark.parametrize("spark", ["local[2]", "standalone"], indirect=True, scope="session")


@pytest.fixture
def out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has no address that executors could know."""
    facts = lagom.spark.spark_session.session_facts

    def without_address(session: Any) -> Any:
        found = facts(session)
        found.bind = None
        return found

    monkeypatch.setattr(lagom.spark.spark, "session_facts", without_address)


@pytest.fixture
def behind_a_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver advertises an address where nobody answers."""
    facts = lagom.spark.spark_session.session_facts

    def elsewhere(session: Any) -> Any:
        found = facts(session)
        found.advertise = "127.0.0.9"
        return found

    monkeypatch.setattr(lagom.spark.spark, "session_facts", elsewhere)


@pytest.mark.usefixtures("out_of_reach")
def test_results_and_output_come_with_the_job(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> int:
        print(f"rank {lagom.rank()} speaks")
        return lagom.rank()

    assert programs.run(speak, 2).per_rank == (0, 1)
    shown = capfd.readouterr()
    assert shown.out == "rank 0 speaks\n"
    assert "no live output or progress" in shown.err


@pytest.mark.soak
@pytest.mark.usefixtures("behind_a_wall")
def test_executors_that_find_nobody_gather_by_themselves(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> int:
        print(f"rank {lagom.rank()} speaks")
        return lagom.rank()

    assert programs.run(speak, 2).per_rank == (0, 1)
    assert capfd.readouterr().out == "rank 0 speaks\n"


@pytest.mark.soak
@pytest.mark.usefixtures("out_of_reach")
def test_large_data_and_results_travel_in_the_job(spark: Any) -> None:
    data = torch.arange(20 << 17, dtype=torch.float64)
    assert torch.equal(programs.run(lambda train_set: train_set, 2, train_set=data).value, data)


@pytest.mark.soak
@pytest.mark.usefixtures("out_of_reach")
def test_failures_come_in_the_text_of_the_job(spark: Any) -> None:
    with pytest.raises(programs.LateError, match="the disk is full") as caught:
        programs.run(programs.raise_while_the_other_sleeps, 2)
    assert "on rank 1" in str(caught.value.__cause__)
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        programs.run(programs.be_killed, 2)


@pytest.mark.soak
@pytest.mark.usefixtures("out_of_reach")
def test_a_killed_worker_of_spark_is_named(spark: Any) -> None:
    with pytest.raises(LagomError, match=r"the process that held rank 1 on .* was killed by SIGKILL"):
        programs.run(programs.kill_the_holder, 2)
    assert programs.run(programs.place, 2).per_rank == ((0, 2), (1, 2))


@pytest.mark.soak  # tests/integration/test_failing.py shows it by default where ranks are told of it
@pytest.mark.usefixtures("out_of_reach")
def test_ctrl_c_ends_job_and_ranks(spark: Any, tmp_path: Path) -> None:
    import os
    import signal

    sent: dict[str, Any] = {}

    def press() -> None:
        sent["pids"] = programs.pids_in(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        programs.run(programs.sleep_in, 2, hparams={"folder": str(tmp_path)})
    while any(programs.alive(pid) for pid in sent["pids"]):
        # Only Spark can tell them, and gives them spark.python.task.killTimeout (2 s) to hear it.
        time.sleep(0.02)
    thread.join()
    programs.run(programs.nothing, 2)  # clears up what the killed processes have left


@pytest.fixture
def late_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Task 1 starts later than the driver waits for it."""
    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped
    made = spark_task.spark_task
    monkeypatch.setattr(spark_task, "spark_task", lambda *args: programs.late(made(*args), 0.8))
    monkeypatch.setattr(lagom.driver.run, "GATHER_S", 0.3)
    cloudpickle.register_pickle_by_value(programs)
    yield
    cloudpickle.unregister_pickle_by_value(programs)


@pytest.mark.soak
@pytest.mark.usefixtures("late_task")
def test_a_late_rank_is_gathered_without_the_driver(
    spark: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sent: list[str] = []
    send: Callable[..., None] = DriverServer.send

    def counted(self: Any, to: int, message: Any) -> None:
        sent.append(message.tag)
        send(self, to, message)

    monkeypatch.setattr(DriverServer, "send", counted)

    def speak() -> int:
        print("heard at once")
        return lagom.rank()

    assert programs.run(speak, 2).per_rank == (0, 1)
    assert sent.count("gather") == 2
    assert "peers" not in sent
    assert capfd.readouterr().out == "heard at once\n"
