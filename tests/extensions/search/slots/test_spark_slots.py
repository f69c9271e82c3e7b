"""Slots of a search that take several Spark tasks of one host, by the messages of the tasks."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.errors import PlanError
from lagom.extensions.search.on_rank.messages import SlotJoin
from lagom.extensions.search.slots.choose_slots import num_slots
from lagom.extensions.search.slots.spark_slots import SparkSlots
from lagom.extensions.search.slots.trial_slots import SlotEvent
from lagom.plan import plan
from lagom.program.signature import Call
from lagom.wire.messages import Closed, LocalEvent, Message
from tests.extensions.search.searching import slot_join


class Tasks:
    """Sends the messages of tasks to slots, and keeps those that the slots pass on."""

    def __init__(self, slots: SparkSlots) -> None:
        self._slots = slots
        self.passed_on: list[tuple[int, Any]] = []

    def send(self, task: int, message: Message | LocalEvent) -> None:
        self._slots.events.put(SlotEvent(task, message))
        self._slots.serve(lambda slot, passed: self.passed_on.append((slot, type(passed))), 1.0)

    def join(self, task: int, host: str = "a") -> None:
        self.send(task, slot_join(task, host=host))


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    """Tasks of two slots of two tasks each."""
    of_trial = plan(TorchDistributedConfig(world_size=2), Cluster(launcher="spark", slots=4))
    with contextlib.ExitStack() as stack:
        slots = SparkSlots(None, of_trial, Call(function=print, provided={}), 2)  # type: ignore[arg-type]
        stack.enter_context(slots.channel)
        stack.push(slots)
        yield Tasks(slots)


def test_the_task_that_takes_the_place_of_a_lost_first_one_forms_a_slot_with_the_others(tasks: Tasks) -> None:
    for task in range(4):
        tasks.join(task)
    for task in (0, 2):
        tasks.send(task, Closed())
    for task in (100, 102):
        tasks.join(task)
    assert tasks.passed_on == [
        (0, SlotJoin),
        (2, SlotJoin),
        (0, Closed),
        (2, Closed),
        (1, SlotJoin),
        (100, SlotJoin),
    ]


def test_a_host_with_too_few_tasks_is_an_error_when_all_have_joined(tasks: Tasks) -> None:
    for task in range(3):
        tasks.join(task, f"host {task}")
    with pytest.raises(PlanError, match="no host has more than 1; set ranks_per_trial=1"):
        tasks.join(3, "host 3")
    assert tasks.passed_on == []


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_released_slot_ends_its_tasks_where_spark_removes_idle_executors(dynamic: bool) -> None:
    of_trial = plan(TorchDistributedConfig(world_size=2), Cluster(launcher="spark", slots=4))
    facts: Any = types.SimpleNamespace(dynamic=dynamic)
    ended = list[int]()
    with contextlib.ExitStack() as stack:
        slots = SparkSlots(facts, of_trial, Call(function=print, provided={}), 4)
        stack.enter_context(slots.channel)
        stack.push(slots)
        tasks = Tasks(slots)
        for task in range(5):
            tasks.join(task)
        slots.channel.send = lambda slot, message: ended.append(slot)  # type: ignore[method-assign, assignment]
        assert slots.release(0) is dynamic
        assert sorted(ended) == ([0, 1, 4] if dynamic else [])  # the fifth task waits for a sixth
        tasks.join(5)
        tasks.join(6)
    passed_on = [slot for slot, _ in tasks.passed_on]
    assert passed_on == ([0, 2, 5] if dynamic else [0, 2, 4])


@pytest.mark.parametrize(
    ("cluster", "wanted", "trials", "found"),
    [
        ({"slots": 2, "oversubscribe": True}, None, 9, 9),
        ({"slots": 2, "oversubscribe": True}, 4, 9, 4),
        ({"slots": 2, "oversubscribe": True}, None, None, 2),
        ({"slots": 6}, None, 9, 6),
        ({"slots": 6}, None, 3, 3),
    ],
)
def test_a_search_wants_a_slot_for_each_trial_where_spark_may_allocate_without_a_limit(
    cluster: dict[str, Any], wanted: int | None, trials: int | None, found: int
) -> None:
    facts = Cluster(launcher="spark", barrier=False, **cluster)
    assert num_slots(plan(TorchDistributedConfig(world_size=1), facts), facts, wanted, trials) == found
