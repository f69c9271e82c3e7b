"""``lagom.extensions.resume.snapshot_pace``: snapshots come when they were asked for, or take 1% of the time."""

from __future__ import annotations

import resource
import time
from types import SimpleNamespace

import pytest

from lagom.extensions.resume import snapshot_pace
from lagom.extensions.resume.snapshot_pace import SHARE, SnapshotPace

PREPARED_S, WROTE_S, USED_S, COPIED_S = 0.02, 2.0, 0.3, 0.2
STEP_S, SYSTEM = 0.1, 0.25
"""Seconds of a step, and the part of them that the system works for this process anyway."""


def taken(every_s: float | str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many snapshots are taken in so many seconds, each of which takes as much as the constants say."""
    clock, system = [100.0], [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_stime=system[0]))
    pace, number, written_at = SnapshotPace(every_s), 0, 0.0
    while clock[0] < 100.0 + seconds:
        clock[0] += STEP_S
        system[0] += STEP_S * SYSTEM
        if written_at and clock[0] >= written_at:
            system[0] += COPIED_S
            pace.written(USED_S)
            written_at = 0.0
        elif not written_at and clock[0] >= pace.next_at:
            clock[0] += PREPARED_S
            pace.fork(clock[0] - PREPARED_S)
            number, written_at = number + 1, clock[0] + WROTE_S
    return number


def test_they_are_as_far_apart_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(20.0, 1000.0, monkeypatch) == pytest.approx(50, abs=2)


def test_they_are_further_apart_if_the_rank_itself_would_take_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_pace, "SHARE", PREPARED_S / 40.0)
    assert taken(20.0, 1000.0, monkeypatch) == pytest.approx(25, abs=2)


def test_with_auto_all_that_they_take_is_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 5000.0 * SHARE / (PREPARED_S + USED_S + COPIED_S)
    assert taken("auto", 5000.0, monkeypatch) == pytest.approx(wanted, abs=2)


def test_with_auto_small_ones_are_10_s_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREPARED_S", "USED_S", "COPIED_S"):
        monkeypatch.setitem(globals(), name, 0.001)
    assert taken("auto", 1000.0, monkeypatch) == pytest.approx(100, abs=2)


@pytest.mark.parametrize(("every_s", "wanted_s"), [(10.0, 0.005 / SHARE), ("auto", 0.105 / SHARE)])
def test_a_fork_that_fails_is_paid_for_before_the_next(
    every_s: float | str, wanted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an hour in which the share was not used up, or was."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    pace = SnapshotPace(every_s)
    while clock[0] < 3600.0:
        clock[0] = max(clock[0], pace.next_at) + 0.005
        pace.fork(clock[0] - 0.005)
        clock[0] += 0.1
        pace.written(0.3)
    clock[0] = pace.next_at + 0.005
    pace.fork(clock[0] - 0.005)
    clock[0] += 0.1
    pace.put_off(None)
    assert pace.next_at - clock[0] == pytest.approx(wanted_s)


def test_after_a_refusal_it_is_looked_again_soon_and_told_when_none_was_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    pace = SnapshotPace(10.0)
    clock[0] = 11.0
    assert not pace.put_off(0.001)
    assert pace.next_at == pytest.approx(11.1)
    clock[0] = 21.0
    assert pace.put_off(0.0)
    assert pace.next_at == pytest.approx(21.02)
