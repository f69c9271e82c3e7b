"""``lagom.driver.aggregate``: from what every rank returned to what one machine would have returned."""

from __future__ import annotations

import logging
import math
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lagom.driver.aggregate import aggregate, remedy
from tests.returned import AVERAGED, KEPT

EVEN = [5, 5]


def of_classes_of_its_own(number: float) -> dict[str, Any]:
    """Return a rank's value of a function that defines classes inside."""
    pair = namedtuple("pair", "a b")

    @dataclass
    class Record:
        x: float = number

    class Kind(Enum):
        ONE = 1

    return {
        "pair": pair(1, "x"),
        "record": Record(),
        "kind": Kind.ONE,
        "model": type("M", (nn.Linear,), {})(1, 1).eval(),
    }


def test_values_of_classes_that_each_rank_defines_are_compared_by_what_they_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    first = of_classes_of_its_own(1.0)
    torch.manual_seed(0)
    aggregate([first, of_classes_of_its_own(1.0)], EVEN)
    assert not caplog.records
    aggregate([first["record"], of_classes_of_its_own(2.0)["record"]], EVEN)
    assert ".x" in caplog.text


@pytest.mark.parametrize("kind", sorted(AVERAGED | KEPT))
def test_equal_values_of_every_type_raise_no_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    made = [(AVERAGED | KEPT)[kind](2.0) for _ in range(3)]
    assert aggregate(made, [5, 5, 4]) is made[0]
    assert caplog.records == []


@pytest.mark.parametrize("kind", sorted(AVERAGED))
def test_floats_of_a_returned_value_are_averaged_and_nothing_else_of_it(kind: str) -> None:
    make = AVERAGED[kind]
    first = make(1.0)
    made = aggregate([first, make(4.0)], [30, 10])
    assert type(made) is type(first)
    texts = [
        repr(one).replace("np.float64", "np.float").replace("np.float32", "np.float") for one in (made, make(1.75))
    ]
    assert texts[0] == texts[1]
    assert repr(first) == repr(make(1.0))  # which per_rank has


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_what_has_no_mean_is_told_of_and_is_rank_0s(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    made = [KEPT[kind](x) for x in (1.0, 2.0)]
    assert aggregate(made, EVEN, remedy("split", "gathered")) is made[0]
    assert "taking rank 0's. This is not one process's number: batches=\"whole\" gives that" in caplog.text


def test_a_warning_names_the_places_and_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    made = [{"loss": x, "best": {"epoch": int(x)}, "all": [x] * 5} for x in (1.0, 2.0)]
    assert aggregate(made, EVEN, remedy("split", "sharded")) == {"loss": 1.5, "best": {"epoch": 1}, "all": [1.5] * 5}
    assert (
        "different values: ['all'][0] (1.0, 2.0), ['all'][1] (1.0, 2.0), ['all'][2] (1.0, 2.0) and 4 more"
        in caplog.text
    )
    assert "of floats their mean, weighted by the samples each rank trained on, else rank 0's" in caplog.text
    assert 'batches="whole" and evaluation="gathered" gives that' in caplog.text
    assert "of its own" in remedy("whole", "gathered")


def test_zero_is_equal_to_minus_zero_and_order_of_keys_and_sets_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    first = {"a": 0.0, "b": torch.zeros(1), "c": {3.5, "x"}}
    assert aggregate([first, {"c": {"x", 3.5}, "b": -torch.zeros(1), "a": -0.0}], EVEN) is first
    assert caplog.records == []


def test_a_value_that_is_in_itself_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    made: list[list[Any]] = [[x] for x in (1.0, 1.0, 2.0)]
    for one in made:
        one.append({"all": one})
    assert aggregate(made[:2], EVEN) is made[0]
    assert caplog.records == []
    assert aggregate(made[1:], EVEN)[0] == 1.5


def test_different_numbers_give_their_mean_weighted_by_samples(caplog: pytest.LogCaptureFixture) -> None:
    assert aggregate([1.0, 4.0], [30, 10], "A remedy.") == pytest.approx(1.75)
    assert "different values: (1.0, 4.0); taking their mean" in caplog.text
    assert caplog.messages[0].endswith(". A remedy.")
    assert caplog.records[0].levelno == logging.WARNING


def test_a_whole_number_and_a_float_are_averaged() -> None:
    assert aggregate([1, 2.0], EVEN) == 1.5


def test_without_any_sample_all_ranks_weigh_the_same() -> None:
    assert aggregate([1.0, 2.0, 6.0], [0, 0, 0]) == pytest.approx(3.0)


def test_a_rank_without_samples_counts_nothing() -> None:
    assert aggregate([1.0, 99.0], [10, 0]) == 1.0


def test_a_rank_without_samples_whose_number_is_nan_counts_nothing() -> None:
    assert aggregate([1.0, math.nan], [10, 0]) == 1.0


def test_a_nan_that_one_rank_trained_to_stays_visible() -> None:
    assert math.isnan(aggregate([1.0, math.nan], EVEN))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(2), [1.0, 1.0]),
        (None, 1.0),
        (1.0, None),
        (np.array([1.0]), [1.0]),
        (np.ones(2), np.ones(2, dtype="f4")),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, 3),
    ],
)
def test_what_has_no_mean_is_rank_0s_with_a_warning_that_says_so(
    first: Any, second: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert aggregate([first, second], EVEN) is first
    assert "rank 0's" in caplog.text


def test_numbers_of_different_types_are_not_called_equal(caplog: pytest.LogCaptureFixture) -> None:
    aggregate([1, True], EVEN)
    assert len(caplog.records) == 1


def test_a_value_whose_parts_cannot_be_had_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    class Torn(dict[str, float]):
        def __getitem__(self, key: str) -> float:
            raise OSError("gone")

    made = [Torn(loss=x) for x in (1.0, 2.0)]
    assert aggregate(made, EVEN) is made[0]
    assert "cannot be compared (OSError: gone); taking rank 0's" in caplog.text


def test_one_rank_needs_no_agreement() -> None:
    value = object()
    assert aggregate([value], [0]) is value


def test_the_warning_is_short_however_long_the_values_are(caplog: pytest.LogCaptureFixture) -> None:
    aggregate(["x" * 10_000 + str(rank) for rank in range(100)], [1] * 100)
    assert len(caplog.text) < 600
