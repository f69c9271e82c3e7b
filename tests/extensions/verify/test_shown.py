"""``lagom.extensions.verify.shown``: results of every type, as a rank notes them and as they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lagom.extensions.verify.comparison_row import AgreementLevel, ComparisonRow
from lagom.extensions.verify.on_rank.record import Record
from lagom.extensions.verify.on_rank.tensor_sketch import flat
from lagom.extensions.verify.shown import compare_results
from tests.returned import AVERAGED, KEPT

ALL = AVERAGED | KEPT


def returned(value: object) -> Record:
    return Record(returned=True, value=flat(value))


def compared(one: object, *ranks: object, again: object = ...) -> ComparisonRow:
    second = None if again is ... else returned(again)
    return compare_results(returned(one), [returned(rank) for rank in ranks], second, 2.2e-16)


@pytest.mark.parametrize("kind", sorted(ALL))
def test_equal_results_of_every_type_agree(kind: str) -> None:
    assert compared(*(ALL[kind](2.0) for _ in range(3))).level == AgreementLevel.AGREES


@pytest.mark.parametrize("kind", sorted(ALL))
def test_a_difference_between_ranks_and_one_process_is_found_in_every_type(kind: str) -> None:
    make = ALL[kind]
    assert compared(make(1.0), make(2.0), make(2.0)).level == AgreementLevel.DIFFERS


@pytest.mark.parametrize("kind", sorted(ALL.keys() - {"length of a list"}))
def test_what_one_process_returns_otherwise_the_second_time_is_left_out(kind: str) -> None:
    make = ALL[kind]
    assert compared(make(1.0), make(2.0), make(2.0), again=make(3.0)).level == AgreementLevel.AGREES


@pytest.mark.parametrize("kind", sorted(AVERAGED))
def test_floats_that_are_right_on_the_average_agree(kind: str) -> None:
    make = AVERAGED[kind]
    assert compared(make(2.0), make(1.0), make(3.0)).level == AgreementLevel.AGREES


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_what_has_no_mean_is_not_averaged(kind: str) -> None:
    make = KEPT[kind]
    assert compared(make(2.0), make(1.0), make(3.0)).level == AgreementLevel.DIFFERS


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["array", "tensor"])
def test_complex_numbers_may_differ_by_rounding(make: Callable[[list[complex]], object]) -> None:
    one, near, other = make([1 + 2j, complex(math.nan)]), make([1 + 2.000000001j, complex(math.nan)]), make([1 + 3j, 0])
    assert compared(one, near, near).level == AgreementLevel.AGREES
    assert compared(one, other, other).level == AgreementLevel.DIFFERS


def test_numbers_within_a_text_may_differ_in_their_last_digit() -> None:
    assert compared("accuracy 0.843", "accuracy 0.843", "accuracy 0.843").level == AgreementLevel.AGREES
    assert compared("accuracy 0.843", "accuracy 0.844", "accuracy 0.844").level == AgreementLevel.AGREES
    assert compared("accuracy 0.843", "accuracy 0.421", "accuracy 0.421").level == AgreementLevel.DIFFERS


def test_the_place_of_a_difference_is_named() -> None:
    found = compared({"epochs": 3, "best": {"accuracy": 0.84}}, {"epochs": 3, "best": {"accuracy": 0.41}})
    assert (found.one, found.ranks, found.note) == ("0.84", "0.41", "in ['best']['accuracy']")
