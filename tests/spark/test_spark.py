"""Failures of Spark itself; tests that need a cluster are in tests/integration."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lagom.driver.run import RunView
from lagom.errors import LagomError, PayloadError, PlanError
from lagom.program.signature import Call
from lagom.spark import spark as spark_module
from lagom.spark.spark import SparkLauncher, SparkPayload, rows_of_failure
from lagom.spark.spark_job import SparkJob
from lagom.spark.spark_session import ClassicFacts, SparkFacts


class _NothingFailed:
    def failures(self) -> list[object]:
        return []


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "  File \"worker.py\", line 1920\n    import pyarrow as pa\nModuleNotFoundError: No module named 'pyarrow'",
            "the executors' Python lacks pyarrow",
        ),
        (
            "PySparkImportError: [PACKAGE_NOT_INSTALLED] PyArrow >= 18.0.0 must be installed; however, it was not",
            "the executors' Python lacks PyArrow",
        ),
        (
            'java.io.IOException: Cannot run program "python3": error=2, No such file or directory',
            "executors have no python3 to run",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, PySpark",
            "executors run Python 3.10, and not 3.11",
        ),
        (
            "Exception: Python in worker has different version 3.9 than that in driver 3.11, PySpark cannot run",
            "executors run Python 3.9, and not 3.11",
        ),
    ],
)
def test_executors_whose_python_will_not_do_are_one_line_with_what_to_do(said: str, meant: str) -> None:
    run: RunView = _NothingFailed()  # type: ignore[assignment]
    with pytest.raises(LagomError) as raised:
        rows_of_failure(RuntimeError(f"Job aborted due to stage failure: {said}\n\tat org.apache.spark"), run)
    told = str(raised.value)
    assert told.startswith(f"Spark's job failed: {meant}. Install it there, or")
    assert f"set PYSPARK_PYTHON to a Python that has what this one has ({sys.executable})" in told
    assert "\n" not in told


def test_a_call_that_cannot_be_pickled_leaves_no_file_open() -> None:
    lock = threading.Lock()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PayloadError, match="'lock'"):
        SparkPayload(Call(function=lambda: lock.locked(), provided={}))
    assert os.listdir("/proc/self/fd") == before


def test_another_failure_is_told_as_it_is() -> None:
    run: RunView = _NothingFailed()  # type: ignore[assignment]
    with pytest.raises(LagomError, match=r"^Spark's job failed: the disk is full$"):
        rows_of_failure(RuntimeError("the disk is full\n\tat org.apache.spark"), run)


@pytest.mark.parametrize(
    ("conf", "encrypted", "encrypts"),
    [
        ({}, False, False),
        ({"spark.authenticate": "true"}, False, True),
        ({"spark.network.crypto.enabled": "true", "spark.authenticate": "true"}, True, True),
        ({"spark.network.crypto.enabled": "TRUE"}, True, False),
        ({"spark.authenticate.enableSaslEncryption": "true", "spark.authenticate": "true"}, True, True),
        ({"spark.ssl.rpc.enabled": "true"}, True, True),
        ({"spark.ssl.enabled": "true", "spark.io.encryption.enabled": "true"}, False, False),
    ],
)
def test_what_counts_as_sparks_encryption(conf: dict[str, str], encrypted: bool, encrypts: bool) -> None:
    session = SimpleNamespace(conf=SimpleNamespace(get=lambda key, default: conf.get(key, default)))
    found = SparkFacts(session)
    assert (found.encrypted, found.encrypts) == (encrypted, encrypts)


def test_executors_that_come_with_demand_are_counted_up_to_their_most_and_need_no_barrier() -> None:
    conf = {"spark.master": "spark://host:7077", "spark.dynamicAllocation.enabled": "true", "spark.executor.cores": "2"}
    context = _Context(last=1)
    session = SimpleNamespace(
        conf=SimpleNamespace(get=lambda key, default: conf.get(key, default)), sparkContext=context
    )
    cluster = ClassicFacts(session).cluster()
    assert (cluster.slots, cluster.oversubscribe, cluster.barrier) == (1, True, False)
    conf["spark.dynamicAllocation.maxExecutors"] = "3"
    cluster = ClassicFacts(session).cluster()
    assert (cluster.slots, cluster.oversubscribe, cluster.barrier) == (6, False, False)
    conf["spark.speculation"] = "true"
    with pytest.raises(PlanError, match=r"second copies of ranks; set spark\.speculation=false"):
        ClassicFacts(session).cluster()


class _Context:
    """A Spark context whose executors are as many as ``counts`` says, each time that it is asked; at last ``last``."""

    def __init__(self, last: int) -> None:
        self.counts: list[int] = []
        self.last = last
        self.startTime = 0
        profile = SimpleNamespace(defaultResourceProfile=lambda: None)
        executors = SimpleNamespace(size=lambda: self.counts.pop(0) if self.counts else self.last)
        spark = SimpleNamespace(
            resourceProfileManager=lambda: profile,
            getExecutorIds=lambda: executors,
            maxNumConcurrentTasks=lambda profile: self.last,
        )
        self._jsc = SimpleNamespace(sc=lambda: spark)


def test_executors_that_are_lost_are_awaited_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lagom.spark.spark_session.EXECUTORS_S", 1000.0)
    monkeypatch.setattr("lagom.spark.spark_session.IMPATIENT_S", 0.1)
    conf = {"spark.master": "spark://host:7077", "spark.executor.instances": "3", "spark.driver.host": "here"}
    context = _Context(last=3)
    found = ClassicFacts(
        SimpleNamespace(conf=SimpleNamespace(get=lambda key, default: conf.get(key, default)), sparkContext=context)
    )
    assert found.slots() == 3
    context.counts = [2] * 4
    assert found.slots() == 3
    assert context.counts == []
    assert "2 of 3 executors are there; waiting for Spark, for 1000 s" in caplog.text
    context.last = 1  # these do not come back
    monkeypatch.setattr("lagom.spark.spark_session.EXECUTORS_S", 1.0)
    assert found.slots() == 1
    monkeypatch.setattr("lagom.spark.spark_session.EXECUTORS_S", 1000.0)
    assert found.slots() == 1
    assert caplog.text.count("waiting") == 2


def test_a_job_that_spark_does_not_end_is_left_where_failures_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setattr("lagom.spark.spark.CANCELLED_S", 0.1)
    never, cancelled = threading.Event(), list[str]()
    launcher = object.__new__(SparkLauncher)
    launcher.facts = SimpleNamespace(  # type: ignore[assignment]
        tag=lambda *about: None,
        map_tasks=lambda *about: never.wait(),
        thread_class=lambda: threading.Thread,
        cancel=cancelled.append,
        hears_decommissions=False,
    )
    failure = {"rank": 1, "ok": False}
    run = SimpleNamespace(
        watch=lambda: None,
        finish=lambda: None,
        announce=lambda loss: None,
        lost=lambda: None,
        failures=lambda: [failure],
        stopped=True,
        has_tasks=False,
    )
    spec: Any = SimpleNamespace(run_id="x")
    the_plan: Any = SimpleNamespace(name="x", world_size=2)
    with ExitStack() as stack:
        assert launcher.run_job(cast(RunView, run), the_plan, spec, stack) == []
    assert cancelled == ["lagom-x"]
    never.set()


@pytest.mark.parametrize(("failures", "cancelled"), [([{"rank": 0}], []), ([], ["group"])])
def test_a_slow_task_can_return_the_exception_of_a_failed_rank(
    failures: list[object], cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark drops the result of a cancelled job, and with it the program's own exception."""
    monkeypatch.setattr(spark_module, "CANCEL_S", 0.0)
    groups: list[str] = []
    launcher = object.__new__(SparkLauncher)
    launcher.facts = cast("SparkFacts", SimpleNamespace(cancel=groups.append))
    running = SparkJob(lambda: time.sleep(0.2), threading.Thread)
    running.start()
    launcher.end_job(running, cast("RunView", SimpleNamespace(failures=lambda: failures, has_tasks=True)), "group")
    running.result()
    assert groups == cancelled
