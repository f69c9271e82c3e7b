"""Output that waits to be shown stays within its memory limit."""

from __future__ import annotations

import contextlib
import queue
import threading

import pytest

from lagom.driver.rank_events import RankEvents
from lagom.wire.messages import Dropped, JobOver, LocalEvent, Log, Lost, Message
from tests.watch.heartbeats import report_of


def line(text: str) -> Log:
    return Log(rank=0, stream="stdout", data=text)


def drained(events: RankEvents) -> list[Message | LocalEvent]:
    found: list[Message | LocalEvent] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(events.get())
    return found


def test_output_that_nobody_takes_is_dropped_and_counted_and_all_else_is_kept() -> None:
    events = RankEvents(limit=100)
    for number in range(20):
        events.put(line(f"{number:09}"))
        events.put(Lost(message=str(number)))
    events.put(report_of())
    found = drained(events)
    assert [one.data for one in found if isinstance(one, Log)] == [f"{number:09}" for number in range(10)]
    assert [one.message for one in found if isinstance(one, Lost)] == [str(number) for number in range(20)]
    assert found[-1] == Dropped(messages=10)
    assert drained(events) == []


def test_what_was_dropped_is_said_where_it_is_missing() -> None:
    events = RankEvents(limit=100)
    for _ in range(12):
        events.put(line("x" * 9))
    assert isinstance(events.get(), Log)
    events.put(line("after"))
    assert [type(one) for one in drained(events)] == [Log] * 9 + [Dropped, Log]


def test_a_wait_ends_with_what_comes_or_with_its_time() -> None:
    events = RankEvents()
    with pytest.raises(queue.Empty):
        events.get(timeout=0.01)
    thread = threading.Timer(0.05, lambda: events.put(JobOver()))
    thread.start()
    assert events.get(timeout=30) == JobOver()
    thread.join()
