"""``lagom.driver.rank_places``: which hosts count as lost, and have their executors ended by Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lagom.driver.rank_places import RankPlaces
from lagom.spark.spark_session import ClassicFacts
from tests.wire.joins import join

JOINS = {task: join(task, host=f"w{task}|boot") for task in range(3)}
SEEN = {task: f"192.168.0.{task}" for task in JOINS}


def places(silences: dict[int, float]) -> RankPlaces:
    """Places of three tasks, which have been silent for so long."""
    found = RankPlaces(JOINS, 20.0)
    for task, seconds in silences.items():
        found.update(task, min(seconds, 4.0))
        found.update(task, seconds)
    return found


@pytest.mark.parametrize(
    ("silences", "lost"),
    [
        ({}, set()),
        ({0: 0.5, 1: 20.1}, {"w1", "10.0.0.1", "192.168.0.1"}),
        ({0: 4.2, 1: 20.1}, {"w1", "10.0.0.1", "192.168.0.1"}),  # the other may come back
        ({0: 19.2, 1: 20.1}, {"w0", "10.0.0.0", "192.168.0.0", "w1", "10.0.0.1", "192.168.0.1"}),
        ({0: 4.2}, set()),  # another task was killed
        ({0: 20.0, 1: 20.0, 2: 20.0}, set()),  # this machine itself may be cut off
    ],
)
def test_hosts_that_are_silent_for_long_while_others_answer_are_lost(
    silences: dict[int, float], lost: set[str]
) -> None:
    assert places(silences).lost_hosts(SEEN) == lost


@pytest.mark.parametrize(
    ("silences", "cause"),
    [
        ({}, "the process that held rank 1 on w1 is gone"),
        ({1: 4.2}, "the process that held rank 1 on w1 is gone"),  # killed, and then its machine answered
        ({1: 20.1}, "no sign of life came for 20 s from the machine that held rank 1 on w1"),
    ],
)
def test_a_machine_is_the_cause_only_after_the_whole_silence(silences: dict[int, float], cause: str) -> None:
    assert str(places(silences).gone(1)).startswith(cause)


class Jvm:
    """Spark's side of a session whose executors are on these hosts."""

    def __init__(self, hosts: dict[str, str], *, answers: bool = True) -> None:
        self.hosts = hosts
        self.answers = answers
        self.ended: list[str] = []

    def sc(self) -> Jvm:
        return self

    def statusStore(self) -> Any:
        rows = [
            SimpleNamespace(
                id=lambda name=name: name,
                hostPort=lambda host=host: f"{host}:7077",
                activeTasks=lambda name=name: name == "1",
            )
            for name, host in self.hosts.items()
        ]
        seq = SimpleNamespace(size=lambda: len(rows), apply=rows.__getitem__)
        return SimpleNamespace(executorList=lambda _: seq)

    def killAndReplaceExecutor(self, name: str) -> bool:
        if not self.answers:
            raise RuntimeError("the master is out of reach\n  at java...")
        self.ended.append(name)
        return True

    def resourceProfileManager(self) -> Any:
        return SimpleNamespace(defaultResourceProfile=lambda: None)

    def maxNumConcurrentTasks(self, _: Any) -> int:
        return len(self.hosts) - 1 - len(self.ended)


def facts(jvm: Jvm) -> ClassicFacts:
    """A session whose driver has this JVM."""
    conf = SimpleNamespace(get=lambda key, default: {"spark.master": "spark://m:7077"}.get(key, default))
    return ClassicFacts(SimpleNamespace(sparkContext=SimpleNamespace(_jsc=jvm), conf=conf))


def slots_again(jvm: Jvm, cut_off: set[str]) -> int:
    return facts(jvm).slots_again(3, cut_off=frozenset(cut_off))


def test_slots_that_run_tasks_are_not_free() -> None:
    jvm = Jvm({"driver": "m", "0": "w0", "1": "w1", "2": "w1"})
    assert facts(jvm).free_slots(1, one_host=False) == 2
    assert facts(jvm).free_slots(2, one_host=False) == 1  # Spark knows of one task only
    assert facts(jvm).free_slots(1, one_host=True) == 0
    assert facts(Jvm({"driver": "m", "1": "w1", "2": "w1"})).free_slots(1, one_host=True) == 1
    jvm.ended = ["0", "1", "2"]  # Spark still lists them, with a task
    assert facts(jvm).free_slots(0, one_host=False) == 0


def test_all_executors_of_a_lost_host_are_ended_and_no_others() -> None:
    jvm = Jvm({"driver": "w1", "0": "w0", "1": "w1", "2": "w1", "3": "127.0.0.1"})
    assert slots_again(jvm, {"w1", "10.0.0.1"}) == 2
    assert jvm.ended == ["1", "2"]
    by_address = Jvm({"driver": "m", "0": "w0", "1": "localhost"})
    slots_again(by_address, {"another name", "127.0.0.1"})
    assert by_address.ended == ["1"]


@pytest.mark.parametrize(
    ("jvm", "cut_off", "said"),
    [
        (
            Jvm({"driver": "m", "0": "w0"}, answers=False),
            {"w0"},
            "could not be told to end the executors",
        ),
        (Jvm({"driver": "m", "0": "w0"}), {"w7"}, "Spark knows no executor on w7, which is cut off"),
    ],
)
def test_executors_that_cannot_be_ended_are_told_of(
    jvm: Jvm, cut_off: set[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert slots_again(jvm, cut_off) == 1
    assert said in caplog.text
    assert "java" not in caplog.text
