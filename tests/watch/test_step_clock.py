"""``StepClock``: to which part of a training step the time belongs."""

from __future__ import annotations

import threading

import pytest

from lagom.watch import step_clock as module
from lagom.watch.step_clock import (
    BACKWARD,
    BACKWARD_DIVIDED,
    EXCHANGE,
    FORWARD,
    LOADING,
    OPTIMIZER,
    OUTSIDE,
    OWN,
    StepClock,
)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test sets."""
    time = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: time[0])
    return time


def step(clock: StepClock, now: list[float], *, forward_s: float = 2.0) -> None:
    """1 s of loading, ``forward_s`` of forward, 4 s of backward, 8 s of exchange in it, 16 s of optimizer, 32 s own."""
    clock.ask(LOADING)
    now[0] += 1
    clock.give(counts=False)
    before = clock.switch(FORWARD)
    now[0] += forward_s
    clock.switch(before)
    before = clock.begin_backward(BACKWARD)
    now[0] += 3
    with clock.during(EXCHANGE):
        now[0] += 8
    now[0] += 1
    clock.switch(before)
    before = clock.switch(OPTIMIZER)
    now[0] += 16
    clock.switch(before)
    now[0] += 32


WANTED = {LOADING: 1.0, FORWARD: 2.0, BACKWARD: 4.0, EXCHANGE: 8.0, OPTIMIZER: 16.0, OWN: 32.0}


def seconds(clock: StepClock) -> dict[int, float]:
    return {part: one for part, one in enumerate(clock.mean().seconds) if one}


@pytest.mark.parametrize("number", [1, 2, 3, 7, 40])
def test_each_moment_belongs_to_one_part_and_the_sum_is_the_step(now: list[float], number: int) -> None:
    clock = StepClock()
    for _ in range(number):
        step(clock, now)
    clock.end()
    now[0] += 1000  # after the last step
    assert clock.steps == number
    assert seconds(clock) == WANTED
    assert sum(clock.mean().seconds) == 63


def test_the_first_steps_are_left_out_where_there_are_others(now: list[float]) -> None:
    for number, first, counted in ((40, 16, 24), (32, 16, 16), (31, 8, 23), (5, 2, 3), (1, 0, 1)):
        clock = StepClock()
        for one in range(number):
            step(clock, now, forward_s=100 if one < first else 2)
        clock.end()
        assert clock.mean().steps == counted
        assert seconds(clock) == WANTED


def test_evaluations_and_the_time_between_passes_belong_to_no_step(now: list[float]) -> None:
    clock = StepClock()
    for _ in range(4):
        step(clock, now)
        clock.ask(OUTSIDE)  # the pass has ended, or a batch of an evaluation was asked for
        now[0] += 500
        clock.give(counts=False)
        before = clock.switch(FORWARD)
        now[0] += 500
        clock.switch(before)
    clock.end()
    assert (clock.steps, seconds(clock)) == (4, WANTED)


def test_a_batch_without_a_backward_is_a_part_of_the_step_that_has_one(now: list[float]) -> None:
    clock = StepClock()
    for _ in range(2):
        clock.ask(LOADING)
        now[0] += 7
        clock.give(counts=False)
        step(clock, now)
    clock.end()
    assert (clock.steps, seconds(clock)) == (2, {**WANTED, LOADING: 8.0})


def test_without_a_loader_a_step_is_from_backward_to_backward(now: list[float]) -> None:
    clock = StepClock()
    for _ in range(9):
        now[0] += 16  # the first time, this is before the first step
        before = clock.begin_backward(BACKWARD)
        now[0] += 4
        clock.divide_backward(True)
        now[0] += 5
        clock.switch(before)
    now[0] += 1000
    clock.end()
    assert clock.steps == 8
    assert seconds(clock) == {BACKWARD: 4.0, BACKWARD_DIVIDED: 5.0, OWN: 16.0}


def test_backwards_before_the_first_loader_do_not_count(now: list[float]) -> None:
    clock = StepClock()
    for _ in range(3):
        clock.switch(clock.begin_backward(BACKWARD))
        now[0] += 100
    step(clock, now)
    clock.end()
    assert (clock.steps, seconds(clock)) == (1, WANTED)


def test_from_the_256th_step_on_every_seventh_is_timed(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reads = StepClock(), [0]

    def read() -> float:
        reads[0] += 1
        return now[0]

    monkeypatch.setattr(module, "perf_counter", read)
    for number in range(256 + 70):
        is_timed = number < 256 or number % 7 == 0
        reads[0] = 0
        step(clock, now, forward_s=2 if is_timed else 5)
        assert reads[0] == (10 if is_timed else 2)
    clock.end()
    assert clock.steps == 256 + 10
    assert seconds(clock) == WANTED


def test_without_a_loader_later_steps_are_timed_as_rarely(now: list[float]) -> None:
    clock = StepClock()
    for number in range(256 + 70 + 1):
        before = clock.begin_backward(BACKWARD)
        now[0] += 4 if number < 256 or number % 7 == 0 else 100
        clock.switch(before)
        now[0] += 1
    clock.end()
    assert clock.steps == 256 + 10
    assert seconds(clock) == {BACKWARD: 4.0, OWN: 1.0}


def test_other_threads_change_nothing(now: list[float]) -> None:
    clock = StepClock()
    clock.ask(LOADING)
    now[0] += 1
    clock.give(counts=True)

    def use() -> None:
        clock.ask(LOADING)
        clock.give(counts=False)
        clock.switch(FORWARD)
        clock.begin_backward(BACKWARD)
        clock.rename(EXCHANGE)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert clock.part == OWN
    now[0] += 2
    clock.end()
    assert seconds(clock) == {LOADING: 1.0, OWN: 2.0}


def test_no_step_is_no_time() -> None:
    clock = StepClock()
    clock.switch(clock.switch(FORWARD))
    clock.end()
    assert clock.mean().steps == 0
    assert not any(clock.mean().seconds)
