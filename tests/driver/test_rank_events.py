"""Output that waits to be shown stays within its memory limit."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

import pytest

from lagom.driver.rank_events import RankEvents


def line(text: str) -> dict[str, Any]:
    return {"type": "log", "rank": 0, "stream": 1, "data": text}


def drained(events: RankEvents) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(events.get())
    return found


def test_output_that_nobody_takes_is_dropped_and_counted_and_all_else_is_kept() -> None:
    events = RankEvents(limit=100)
    for number in range(20):
        events.put(line(f"{number:09}"))
        events.put({"type": "failed", "rank": number})
    events.put({"type": "progress", "rank": 0})
    found = drained(events)
    assert [one["data"] for one in found if one["type"] == "log"] == [f"{number:09}" for number in range(10)]
    assert [one["rank"] for one in found if one["type"] == "failed"] == list(range(20))
    assert found[-1] == {"type": "dropped", "messages": 10}
    assert drained(events) == []


def test_what_was_dropped_is_said_where_it_is_missing() -> None:
    events = RankEvents(limit=100)
    for _ in range(12):
        events.put(line("x" * 9))
    assert events.get()["type"] == "log"
    events.put(line("after"))
    assert [one["type"] for one in drained(events)] == ["log"] * 9 + ["dropped", "log"]


def test_a_wait_ends_with_what_comes_or_with_its_time() -> None:
    events = RankEvents()
    with pytest.raises(queue.Empty):
        events.get(timeout=0.01)
    thread = threading.Timer(0.05, lambda: events.put({"type": "over"}))
    thread.start()
    assert events.get(timeout=30) == {"type": "over"}
    thread.join()
