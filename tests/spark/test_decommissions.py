"""``decommissions_announced``: which losses a run hears of, from a driver's JVM as Spark 4 has it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.plan import Plan, plan
from lagom.restart.losses import Loss
from lagom.spark import decommissions
from lagom.spark.spark_session import ClassicFacts, SparkFacts
from tests.driver import losses


class Jvm:
    """A driver's JVM with one job of one stage.

    Args:
        tasks: executor of each task, by number.
        leaving: executors that Spark decommissions.
    """

    def __init__(self, tasks: Mapping[int, str], leaving: set[str]) -> None:
        self.tasks, self.leaving = tasks, leaving

    def sc(self) -> Jvm:
        return self

    taskScheduler = statusStore = sc

    def taskList(self, stage: int, attempt: int, most: int) -> Any:
        rows = [
            SimpleNamespace(
                index=lambda number=number: number,
                executorId=lambda executor=executor: executor,
                host=lambda executor=executor: f"host-{executor}",
            )
            for number, executor in self.tasks.items()
        ]
        return SimpleNamespace(size=lambda: len(rows), apply=rows.__getitem__)

    def getExecutorDecommissionState(self, executor: str) -> Any:
        return SimpleNamespace(isDefined=lambda: executor in self.leaving)


def facts(jvm: Any, master: str = "spark://m:7077") -> SparkFacts:
    """A session whose driver has this JVM."""
    conf = SimpleNamespace(get=lambda key, default: {"spark.master": master}.get(key, default))
    tracker = SimpleNamespace(
        getJobIdsForGroup=lambda group: [0, 1],
        getJobInfo=lambda job: SimpleNamespace(stageIds=[3]) if job == 1 else None,
    )
    found = ClassicFacts(
        SimpleNamespace(sparkContext=SimpleNamespace(_jsc=jvm, statusTracker=lambda: tracker), conf=conf)
    )
    found.thread_class = lambda: threading.Thread  # type: ignore[method-assign]
    return found


def the_plan(ranks: int, slots: int) -> Plan:
    gpus = ranks // slots if ranks > slots else 0
    config = TorchDistributedConfig(world_size=ranks, run_dir=None)
    return plan(config, Cluster(launcher="spark", slots=slots, gpus_per_slot=gpus))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(decommissions, "LOOK_S", 0.01)


def test_each_executor_with_ranks_is_announced_once() -> None:
    jvm = Jvm({0: "0"}, {"7"})  # executor 7 has no task of the run
    heard: list[Loss] = []
    with decommissions.decommissions_announced(facts(jvm), "group", the_plan(4, 4), heard.append):
        jvm.tasks = {0: "0", 1: "1", 2: "1", 3: "2"}
        jvm.leaving = {"1", "7"}
        losses.wait_for(lambda: len(heard) == 1)
        jvm.leaving = {"1", "2", "7"}
        losses.wait_for(lambda: len(heard) == 2)
    assert [loss.cause for loss in heard] == [
        "Spark decommissions executor 1 on host-1, which holds ranks 1, 2",
        "Spark decommissions executor 2 on host-2, which holds rank 3",
    ]
    assert all(loss.is_planned and not loss.counts for loss in heard)


def test_a_task_with_several_ranks_names_all() -> None:
    heard: list[Loss] = []
    jvm = Jvm({0: "0", 1: "1"}, {"1"})
    with decommissions.decommissions_announced(facts(jvm), "group", the_plan(6, 2), heard.append):
        losses.wait_for(lambda: bool(heard))
    assert (heard[0].rank, heard[0].cause.rpartition("which holds ")[2]) == (3, "ranks 3-5")


def test_a_spark_that_does_not_tell_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lagom")
    with decommissions.decommissions_announced(facts(object()), "group", the_plan(2, 2), lambda _: None):
        losses.wait_for(lambda: bool(caplog.messages))
    (text,) = caplog.messages
    assert text.startswith("it is not known which executors Spark decommissions: ")


def test_a_local_master_is_not_asked() -> None:
    before = threading.active_count()
    with decommissions.decommissions_announced(facts(object(), "local[2]"), "group", the_plan(2, 2), lambda _: None):
        assert threading.active_count() == before
