"""``lagom.restart.twin_pace``: forks take their share of the time, and no more."""

from __future__ import annotations

import resource
import time
from types import SimpleNamespace

import pytest

from lagom.restart.twin_pace import SHARE, TwinPace

FORK_S = 0.145
"""Cost of a fork of 0.1 s, with the end of the twins before and the work of other processes."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which goes on when the test says so; this process itself takes next to none."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def forks(clock: list[float], seconds: float, *, changes: bool, elsewhere_s: float = 0.0) -> int:
    """Return how many forks of 0.1 s there are in so many seconds, with a backward each 0.1 s.

    Args:
        elsewhere_s: the part of a fork that another process takes, which tells it two steps later.
    """
    pace, number, has_twins, told_at = TwinPace(), 0, False, -1
    for step in range(int(seconds * 10)):
        clock[0] += 0.1
        if step == told_at:
            pace.add(elsewhere_s)
        if changes and step % 50 == 49:
            pace.hurry()
            has_twins = False
        if clock[0] >= pace.next_at and pace.plans(step, has_twins):
            pace.fork(0.1 - elsewhere_s, step)
            told_at = step + 2
            number, has_twins = number + 1, True
    return number


def test_forks_take_their_share_of_the_time(clock: list[float]) -> None:
    assert forks(clock, 1000, changes=False) == pytest.approx(1000 * SHARE / FORK_S, abs=5)


def test_what_another_process_takes_for_them_counts(clock: list[float]) -> None:
    assert forks(clock, 1000, changes=False, elsewhere_s=0.08) == pytest.approx(1000 * SHARE / FORK_S, abs=5)


def test_time_of_the_system_that_steps_take_anyway_does_not_count(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is a third of all time, and pages are copied for 0.1 s after each fork."""
    copied, last = [0.0], [0]

    def usage(_: int) -> SimpleNamespace:
        return SimpleNamespace(ru_stime=clock[0] / 3 + copied[0])

    monkeypatch.setattr(resource, "getrusage", usage)
    pace = TwinPace()
    number = 0
    for step in range(10_000):
        clock[0] += 0.1
        if step == last[0] + 1:
            copied[0] += 0.1
        if clock[0] >= pace.next_at and pace.plans(step, has_twins=True):
            pace.fork(0.1, step)
            number, last[0] = number + 1, step
    assert number == pytest.approx(1000 * SHARE / (2 * FORK_S), abs=3)


def test_an_evaluation_right_after_a_fork_does_not_count(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_stime=clock[0] / 3))
    pace, number = TwinPace(), 0
    for step in range(3_000):
        clock[0] += 0.1
        if clock[0] >= pace.next_at and pace.plans(step, has_twins=True):
            pace.fork(0.1, step)
            number += 1
            clock[0] += 30.0  # and no backward
    assert number > 0.3 * (clock[0] - 100.0) * SHARE / FORK_S


def test_a_twin_that_goes_on_counts_its_own_time(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has used next to none, while the rank from which it was forked had used 30 s."""
    used = [30.0]
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_stime=used[0]))
    pace = TwinPace()
    number = 0
    for step in range(10_000):
        clock[0] += 0.1
        if step == 5_000:
            used[0] = 0.0
        if clock[0] >= pace.next_at and pace.plans(step, has_twins=True):
            pace.fork(0.1, step)
            number += 1
    assert number == pytest.approx(1000 * SHARE / FORK_S, abs=1)


def test_changes_of_files_do_not_make_them_take_more(clock: list[float]) -> None:
    assert 0.5 * 1000 * SHARE / FORK_S <= forks(clock, 1000, changes=True) <= 1000 * SHARE / FORK_S + 1


def test_forks_refused_where_passes_begin_are_tried_at_the_next_one_some_times(clock: list[float]) -> None:
    pace, tried = TwinPace(), 0
    for number in range(100):
        clock[0] += 10.0
        if clock[0] >= pace.next_at and pace.plans(number, has_twins=False):
            tried += 1
            pace.refuse(0.01, begins_pass=True)
            if number == 10:
                assert tried == 11
    assert 16 < tried < 30  # then they are put off, and given up
