"""``Speed``: the seconds of a step by part, the estimate for one process, and what would help."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from typing import Any

import pytest

from lagom.forward.rows.whole_reasons import WholeReason
from lagom.speed import Speed, StepPart, duration
from lagom.speed_advice import Facts, advice
from lagom.whole_modules import WholeModule

PARTS = (
    StepPart(name="loading", seconds=0.010),
    StepPart(name="forward", seconds=0.020, divided=0.75),
    StepPart(name="backward", seconds=0.040, divided=1.0),
    StepPart(name="exchange", seconds=0.005),
    StepPart(name="optimizer", seconds=0.002),
    StepPart(name="own", seconds=0.003),
)
SMALL = WholeModule(
    name="Net",
    kind="Net",
    reason=WholeReason.SMALL,
    text=WholeReason.SMALL.text,
    remedy=WholeReason.SMALL.remedy,
    calls=9,
    share=1.0,
    splits_inside=False,
    is_small=True,
    pays_from=4096,
)
HOOKED = replace(SMALL, reason=WholeReason.HAS_HOOKS, text="has hooks", remedy="remove them", is_small=False)


def part(name: str, seconds: float, **more: Any) -> StepPart:
    return StepPart(name=name, seconds=seconds, **more)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_estimate_is_the_divided_seconds_of_all_ranks_and_the_others_once(world_size: int) -> None:
    divided, repeated = 0.75 * 0.020 + 0.040, 0.010 + 0.25 * 0.020 + 0.002 + 0.003
    speed = Speed(world_size=world_size, steps=10, parts=PARTS)
    exchange = 0.005 if world_size == 1 else 0.0
    assert speed.step_s == pytest.approx(0.080)
    assert speed.one_process_s == pytest.approx(world_size * divided + repeated + exchange)
    shared = (part("loading", 0.5, shared=1.0),)
    assert Speed(world_size=world_size, steps=1, parts=shared).one_process_s == 0.5  # the workers of one process


def test_json_and_pickle_keep_it() -> None:
    speed = Speed(world_size=2, threads=3, steps=10, parts=PARTS, advice=("do this",))
    value = json.loads(json.dumps(speed.as_json()))
    assert Speed.from_json(value) == speed
    assert (value["step_s"], value["one_process_s"]) == (speed.step_s, speed.one_process_s)
    assert pickle.loads(pickle.dumps(speed)) == speed
    empty = Speed(world_size=2)
    assert Speed.from_json(json.loads(json.dumps(empty.as_json()))) == empty


def test_it_is_false_without_steps() -> None:
    assert not Speed(world_size=2)
    assert repr(Speed(world_size=2)) == "<no training step was timed>"
    assert not Speed(world_size=2).is_worth_saying
    assert Speed(world_size=2, steps=1, parts=PARTS)


def test_it_says_what_a_step_takes_and_how_each_part_is_done() -> None:
    speed = Speed(world_size=2, threads=1, steps=10, parts=PARTS)
    alone = "by estimate 130 ms on one process of 1 thread"
    assert speed.line() == f"a step takes 80 ms on 2 ranks, {alone}; 50% backward, 25% forward, 12% loading"
    assert repr(speed).splitlines() == [
        f"<{speed.line()}",
        "  loading: 10 ms, repeated on every rank",
        "  forward: 20 ms, 75% divided, the rest repeated",
        "  backward: 40 ms, divided over the ranks",
        "  exchange: 5 ms, between ranks",
        "  optimizer step: 2 ms, repeated on every rank",
        "  the program's own: 3 ms, repeated on every rank>",
    ]
    assert replace(speed, world_size=1, advice=("do this",)).line() == "a step takes 80 ms; do this"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.234, "1.23 s"), (0.5, "500 ms"), (0.0412, "41.2 ms"), (4e-7, "0.4 us")]
)
def test_durations_have_the_unit_of_their_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_line_is_for_runs_whose_steps_took_a_while() -> None:
    long, short = Speed(world_size=2, steps=13, parts=PARTS), Speed(world_size=2, steps=12, parts=PARTS)
    assert (long.is_worth_saying, short.is_worth_saying) == (True, False)
    assert not replace(long, world_size=1).is_worth_saying
    assert replace(long, world_size=1, advice=("do this",)).is_worth_saying


def test_loading_that_every_rank_repeats_needs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    parts = [part("loading", 0.045), part("forward", 0.055, divided=1.0)]
    (text,) = advice(parts, Facts(2, num_workers=0))
    assert text == "45% of a step is loading, which every rank repeats: give the loader num_workers=2"
    assert advice(parts, Facts(1, num_workers=0)) == ("45% of a step is loading: give the loader num_workers=2",)
    assert "share_loading=True" in advice(parts, Facts(2, num_workers=2))[0]
    (text,) = advice(parts, Facts(2, num_workers=0, loading_reason="Photos counts: share_loading=True divides them"))
    assert text == (
        "45% of a step is loading, which every rank repeats, since Photos counts: share_loading=True divides them"
    )
    assert advice(parts, Facts(2, num_workers=None)) == ()
    shared = [part("loading", 0.08, shared=1.0), part("forward", 0.02, divided=1.0)]
    assert advice(shared, Facts(2, num_workers=1)) == ("80% of a step is loading: give the loader num_workers=4",)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert "add cores" in advice(shared, Facts(2, num_workers=2))[0]


def test_a_module_that_runs_whole_is_named_with_its_reason_and_remedy() -> None:
    parts = [part("forward", 0.03), part("backward", 0.05), part("own", 0.02)]
    (text,) = advice(parts, Facts(2, num_workers=0, whole=[HOOKED]))
    assert text == "80% of a step is forward and backward that every rank repeats: Net has hooks; remove them"
    inside = replace(HOOKED, splits_inside=True, remedy="")
    assert advice(parts, Facts(2, whole=[inside]))[0].endswith("Net (modules inside it are divided) has hooks")


def test_what_cannot_gain_is_told_what_it_would_take() -> None:
    parts = [part("forward", 1e-4), part("backward", 1e-4), part("optimizer", 2e-4), part("own", 1e-4)]
    (text,) = advice(parts, Facts(2, num_workers=0, whole=[SMALL]))
    assert text == "Net is small, so every rank computes all of it: batches of 4,096 rows would be divided"
    never = replace(SMALL, pays_from=None)
    assert advice(parts, Facts(2, whole=[never]))[0].endswith("only a larger one would be divided")
    loads = [part("loading", 0.1), part("own", 0.05), part("forward", 1e-4), part("exchange", 1e-3)]
    first, last = advice(loads, Facts(2, num_workers=0, whole=[SMALL]))
    assert ("loading" in first, last) == (True, text)
    assert advice([part("forward", 0.1), part("own", 0.9)], Facts(2, sees_whole=False, whole=[HOOKED])) != ()


def test_a_gain_in_many_small_parts_needs_no_advice() -> None:
    parts = [part("forward", 0.04, divided=1.0), part("backward", 0.05, divided=1.0), part("exchange", 0.01)]
    assert advice(parts, Facts(2, num_workers=0)) == ()
    assert advice([], Facts(2)) == ()


def test_the_most_helpful_remedies_come_first_and_are_two() -> None:
    parts = [part("optimizer", 0.05), part("loading", 0.03), part("own", 0.04), part("exchange", 0.04)]
    first, second = advice(parts, Facts(3, num_workers=0))
    assert "the optimizer's, which every rank repeats: zero_lvl=1 divides it" in first
    assert "loading" in second
    (only,) = advice(parts[2:], Facts(2, sees_whole=False))
    assert only.startswith("50% of a step is exchange between ranks")
