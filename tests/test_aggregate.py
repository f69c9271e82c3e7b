"""``lagom.aggregate``: from what every rank returned to what one machine would have returned."""

from __future__ import annotations

import logging
import math
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lagom.aggregate import aggregate, remedy
from tests.returned import AVERAGED, KEPT

EVEN = [5, 5]


def of_classes_of_its_own(number: float) -> dict[str, Any]:
    """What a function returns on a rank that defines classes inside."""
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


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        7,
        2**70,
        True,
        "accuracy",
        b"bytes",
        [],
        {},
        Fraction(1, 3),
        complex(1, 2),
        [1, [2.0, "x"]],
        (1, 2),
        {"loss": 0.5, "epochs": [1, 2], "deep": {"auc": 0.9}},
        np.float32(1.5),
        np.arange(3),
        np.array(["a", "b"]),
        np.array([object, None]),
        torch.tensor(2.0),
        torch.arange(3),
        torch.tensor([True, False]),
        torch.zeros(0),
        {"weights": torch.ones(2), "nan": math.nan},
    ],
)
def test_what_is_equal_everywhere_is_returned_as_rank_0_returned_it(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import pickle

    others = [pickle.loads(pickle.dumps(value)) for _ in range(2)]
    assert aggregate([value, *others], [5, 5, 4]) is value
    assert caplog.records == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: math.nan,
        lambda: np.float64("nan"),
        lambda: np.float32("nan"),
        lambda: np.array([1.0, np.nan]),
        lambda: torch.tensor([math.nan, 1.0]),
        lambda: torch.tensor(math.nan, dtype=torch.bfloat16),
        lambda: complex(math.nan, 0),
        lambda: {"loss": [math.nan]},
        lambda: np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    ],
)
def test_nan_is_equal_to_nan(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = make()
    assert aggregate([first, make()], EVEN) is first
    assert caplog.records == []


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
    assert aggregate([1.0, 4.0], [30, 10]) == pytest.approx(1.75)
    assert "different values: (1.0, 4.0); taking their mean" in caplog.text
    assert "per_rank" in caplog.text
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


def test_numpy_scalars_keep_their_type() -> None:
    mean = aggregate([np.float32(1), np.float32(2)], EVEN)
    assert type(mean) is np.float32
    assert mean == 1.5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(2), torch.ones(3)),
        (np.ones(2), np.ones(3)),
        (torch.ones(2), [1.0, 1.0]),
        (torch.tensor([True]), torch.tensor([False])),
        (np.array(["a"]), np.array(["b"])),
        (True, False),
        ("good", "bad"),
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


def test_a_dict_of_metrics_is_averaged_key_by_key_and_what_is_equal_keeps_its_type() -> None:
    mean = aggregate([{"loss": 1.0, "epochs": 3, "ok": True}, {"loss": 3.0, "epochs": 3, "ok": True}], EVEN)
    assert mean == {"loss": 2.0, "epochs": 3, "ok": True}
    assert type(mean["epochs"]) is int
    assert mean["ok"] is True


def test_a_dict_in_a_dict_is_averaged_too() -> None:
    assert aggregate([{"a": {"b": 1.0}}, {"a": {"b": 2.0}}], EVEN) == {"a": {"b": 1.5}}


def test_a_dict_with_a_part_that_has_no_mean_takes_that_part_from_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    assert aggregate([{"loss": 1.0, "who": "a"}, {"loss": 3.0, "who": "b"}], EVEN) == {"loss": 2.0, "who": "a"}
    assert "rank 0" in caplog.text


def test_numbers_of_different_types_are_not_called_equal(caplog: pytest.LogCaptureFixture) -> None:
    aggregate([1, True], EVEN)
    assert len(caplog.records) == 1


def test_an_equality_that_raises_or_gives_an_array_does_no_harm() -> None:
    class Odd:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __eq__(self, other: object) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    for answer in (ValueError("no"), np.array([True, False]), None):
        first = Odd(answer)
        assert aggregate([first, Odd(answer)], EVEN) is first


def test_objects_without_an_equality_of_their_own_are_rank_0s_without_alarm(caplog: pytest.LogCaptureFixture) -> None:
    first = object()
    assert aggregate([first, object()], EVEN) is first
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    assert aggregate(models, EVEN) is models[0]
    assert caplog.records == []


@dataclass
class Report:
    curve: list[float]
    model: Any
    predictions: Any


@pytest.mark.parametrize("kind", [Report, SimpleNamespace])
def test_fields_are_compared_one_by_one(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Their own ``==`` calls modules different, and fails on arrays."""

    def made(weight: float, last: float = 2.0) -> Any:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, weight)
        torch.nn.init.zeros_(model.bias)
        return kind(curve=[0.5, math.nan], model=model, predictions=np.array([1.0, last]))

    first = made(1.0)
    assert aggregate([first, made(1.0)], EVEN) is first
    assert caplog.records == []
    for other in (made(2.0), made(1.0, 3.0)):
        caplog.clear()
        assert aggregate([first, other], EVEN) is first
        assert "rank 0's" in caplog.text


def test_models_with_different_weights_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    assert aggregate(models, EVEN) is models[0]
    assert "rank 0's" in caplog.text


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


def test_a_repr_that_raises_does_not_cost_the_result() -> None:
    class Shy:
        def __eq__(self, other: object) -> bool:
            return False

        def __repr__(self) -> str:
            raise RuntimeError("no")

    first = Shy()
    assert aggregate([first, Shy()], EVEN) is first
