"""``lagom.extensions.verify.agreement``: what is taken for agreement, from records alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest

from lagom.extensions.verify.agreement import agreement_level, compare
from lagom.extensions.verify.closeness import is_near, same_printed, tolerance
from lagom.extensions.verify.comparison_row import AgreementLevel, ComparisonRow
from lagom.extensions.verify.on_rank.record import (
    Record,
    RecordedBatch,
    RecordedLeaf,
    RecordedPass,
    RecordedRead,
    RecordedStep,
)

DOUBLE, SINGLE = 2.2e-16, 1.2e-7


def leaf(epsilon: float = DOUBLE, *, is_parameter: bool = True, end: float = 0.9) -> RecordedLeaf:
    return RecordedLeaf(
        name="Net.weight",
        shape=(2,),
        is_parameter=is_parameter,
        is_data=False,
        epsilon=epsilon,
        start=(1.0, 1.0),
        end=(end, 1.0),
    )


def record(epsilon: float = DOUBLE) -> Record:
    return Record(
        steps=[RecordedStep(loss=1 / (n + 1), weight=1.0, gradients={0: (0.1, 0.0)}) for n in range(4)],
        leaves={0: leaf(epsilon)},
        reads=[RecordedRead(place="train.py:3", value=0.5, step=1)],
        batches=[RecordedBatch(number=(0, 0), rows=(b"a", b"b"), shared=False)],
        num_samples=2,
        printed="loss 0.5000",
        returned=True,
        value=[b"['loss']", 0.5, (1.0, 2.0)],
    )


def shares(epsilon: float = DOUBLE) -> list[Record]:
    """Return the records of two ranks with one sample each; their losses are 10% below and above the right one."""
    ranks = [record(epsilon), record(epsilon)]
    for rank, factor, row in zip(ranks, (0.9, 1.1), (b"a", b"b"), strict=True):
        for step in rank.steps:
            step.loss *= factor
        rank.batches[0] = RecordedBatch(number=(0, 0), rows=(row,), shared=True)
        rank.num_samples, rank.shared = 1, True
    return ranks


def row(rows: list[ComparisonRow], what: str) -> ComparisonRow:
    return next(row for row in rows if row.what == what)


def test_a_rank_without_a_sample_does_not_count() -> None:
    ranks = shares()
    for n, step in enumerate(ranks[1].steps):
        step.loss, step.weight = math.nan, 0.0
        ranks[0].steps[n].loss, ranks[0].steps[n].weight = record().steps[n].loss, 2.0
    assert row(compare(record(), ranks), "losses").level == AgreementLevel.AGREES


CHANGES: dict[str, tuple[str, Callable[[Record], object]]] = {
    "a loss": ("losses", lambda rank: setattr(rank.steps[1], "loss", 0.7)),
    "a backward less": ("losses", lambda rank: rank.steps.pop()),
    "a gradient": ("gradients", lambda rank: rank.steps[2].gradients.update({0: (0.1, 1e-5)})),
    "a gradient that is not there": ("gradients", lambda rank: rank.steps[2].gradients.clear()),
    "a gradient too many": ("gradients", lambda rank: rank.steps[2].gradients.update({1: (0.1,)})),
    "a parameter's end": ("parameters", lambda rank: setattr(rank.leaves[0], "end", (0.9001, 1.0))),
    "a parameter's start": ("parameters", lambda rank: setattr(rank.leaves[0], "start", (1.1, 1.0))),
    "a result": ("result", lambda rank: rank.value.__setitem__(1, 0.6)),
    "a returned tensor": ("result", lambda rank: rank.value.__setitem__(2, (1.0, 2.1))),
    "an end": ("result", lambda rank: setattr(rank, "returned", False)),
    "a NaN": ("gradients", lambda rank: rank.steps[2].gradients.update({0: (math.nan, 0.0)})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_is_found(change: str) -> None:
    what, apply = CHANGES[change]
    ranks = shares()
    apply(ranks[1])
    assert row(compare(record(), ranks), what).level == AgreementLevel.DIFFERS


def test_single_precision_is_allowed_its_rounding_and_no_more() -> None:
    ranks = shares(SINGLE)
    ranks[1].steps[0].gradients[0] = (0.1 + 2e-6, 0.0)
    assert row(compare(record(SINGLE), ranks), "gradients").level == AgreementLevel.AGREES
    ranks[1].steps[0].gradients[0] = (0.1 + 2e-4, 0.0)
    assert row(compare(record(SINGLE), ranks), "gradients").level == AgreementLevel.DIFFERS


def test_a_parameter_with_nothing_but_rounding_for_a_gradient_is_not_compared() -> None:
    one, ranks = record(SINGLE), shares(SINGLE)
    for each, end in ((one, 0.5), (ranks[0], 1.5), (ranks[1], 1.5)):
        each.leaves[1] = leaf(SINGLE, end=end)
        for step in each.steps:
            step.gradients[1] = (1e-9, 0.0)
    assert row(compare(one, ranks), "parameters").level == AgreementLevel.AGREES


def test_a_rank_keeps_the_gradient_of_its_own_part_of_the_data() -> None:
    one, ranks = record(), shares()
    one.leaves[1] = leaf(is_parameter=False)
    one.steps[0].gradients[1] = (5.0, 6.0)
    for rank in ranks:
        rank.leaves[1] = leaf(is_parameter=False)
        rank.leaves[1].is_data = True
        rank.steps[0].gradients[1] = (10.0, 12.0)
    assert agreement_level(compare(one, ranks)) == AgreementLevel.AGREES
    for rank in ranks:
        rank.leaves[1].is_data = False
    assert agreement_level(compare(one, ranks)) == AgreementLevel.DIFFERS
    for rank in ranks:
        rank.leaves[1].shape, rank.leaves[1].start = (1,), (1.0,)
    assert agreement_level(compare(one, ranks)) == AgreementLevel.AGREES


def test_samples_are_counted_over_the_ranks() -> None:
    ranks = shares()
    ranks[1].batches[0] = RecordedBatch(number=(0, 0), rows=(b"a",), shared=True)
    ranks[1].steps[0].loss = 5.0
    found = row(compare(record(), ranks), "samples")
    assert found.level == AgreementLevel.DIFFERS
    assert found.note == "as many, with other contents"
    ranks[1].batches[0].shapes = ((7,),)
    assert "of other shapes" in row(compare(record(), ranks), "samples").note
    ranks[1].batches.clear()
    assert "has other samples" in row(compare(record(), ranks), "samples").note


def test_samples_that_only_look_different_are_no_mistake() -> None:
    ranks = shares()
    ranks[1].batches[0] = RecordedBatch(number=(0, 0), rows=(b"x", b"y", b"z"), shared=True)
    assert row(compare(record(), ranks), "samples").level == AgreementLevel.UNKNOWN


def test_a_number_of_a_share_matters_where_the_program_decides_by_it() -> None:
    ranks = shares()
    ranks[0].reads[0].value = 0.45
    assert row(compare(record(), ranks), "numbers read").level == AgreementLevel.OWN
    ranks[0].reads[0].decides = True
    found = row(compare(record(), ranks), "numbers read")
    assert found.level == AgreementLevel.DIFFERS
    assert "train.py:3" in found.note


def test_a_result_that_is_each_ranks_own_is_judged_by_its_mean() -> None:
    ranks = shares()
    ranks[0].value[1], ranks[1].value[1] = 0.4, 0.6
    assert row(compare(record(), ranks), "result").level == AgreementLevel.AGREES
    ranks[0].num_samples = 3
    assert row(compare(record(), ranks), "result").level == AgreementLevel.DIFFERS


def test_an_evaluation_that_is_dealt_out_is_found() -> None:
    ranks = shares()
    for rank in ranks:
        rank.passes = [
            RecordedPass(num_before=0, num_after=4, is_dealt=True),
            RecordedPass(num_before=4, is_dealt=True),
        ]
    assert row(compare(record(), ranks), "evaluation").level == AgreementLevel.UNKNOWN
    ranks[0].passes[1].num_after = 4
    found = row(compare(record(), ranks), "evaluation")
    assert found.level == AgreementLevel.DIFFERS
    assert "pass 2 over a loader runs no backward" in found.note


@pytest.mark.parametrize(
    ("repeat", "other", "same"),
    [
        ("epoch 1 | 14:02:11s loss 0.50 fps 512", "epoch 1 | 15:59:59s slow loss 0.50 fps 7", True),
        ("epoch 1 | 14:02:11s loss 0.50 fps 512", "epoch 1 | 15:59:59s slow loss 0.90 fps 7", False),
        ("epoch 1 | 15:10:12s loss 0.50 fps 512", "epoch 2 | 15:59:59s loss 0.50 fps 7", False),
        ("epoch 1 | 14:02:10s loss 0.50 fps 499", "epoch 1 | 14:02:10s LOSS 0.50 fps 499", False),
        ("epoch 1 | 14:02:10s loss 0.50 fps 499\nslow!", "nothing alike", True),
    ],
)
def test_times_in_a_printed_line_are_left_out_and_the_rest_is_not(repeat: str, other: str, same: bool) -> None:
    one, again, ranks = record(), record(), shares()
    one.printed, again.printed = "epoch 1 | 14:02:10s loss 0.50 fps 499", repeat
    ranks[0].printed = other
    assert (row(compare(one, ranks, again), "printed").level <= AgreementLevel.AGREES) == same


def test_an_error_is_the_same_when_its_words_are() -> None:
    one, ranks = record(), shares()
    for each in (one, *ranks):
        each.returned, each.error = False, "ValueError: shape (8, 3)"
    ranks[1].error = "ValueError: shape (4, 3)"
    assert row(compare(one, ranks), "ends with").level == AgreementLevel.UNKNOWN
    ranks[1].error = "ValueError: no such file"
    assert row(compare(one, ranks), "ends with").level == AgreementLevel.DIFFERS


def test_a_record_agrees_with_itself_also_when_there_is_nothing_in_it() -> None:
    for one in (record(), Record(), Record(error="KeyError: 'lr'")):
        assert agreement_level(compare(one, [copy.deepcopy(one)])) <= AgreementLevel.AGREES


def test_tolerances_grow_and_stay_bounded() -> None:
    for epsilon in (DOUBLE, SINGLE, 7.8e-3):
        allowed = [tolerance(step, epsilon) for step in range(40)]
        assert allowed == sorted(allowed)
        assert allowed[-1] <= 0.2


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("0.50", "0.51", True),
        ("0.50", "0.53", False),
        ("3", "4", False),
        ("0x7f1", "0x8e2", True),
        ("1.5", "0x8e2", False),
        ("1e-3", "2e-3", False),
        ("1.23e-05", "1.24e-05", True),
        ("1.23e-05", "1.26e-05", False),
        ("1.23E+05", "1.24e5", True),
        ("9.99e-06", "1.00e-05", True),
        ("1.00e-05", "9.99e-06", True),
        ("1.0e-05", "1.0e-06", False),
        ("0.0e+00", "1.3e-17", True),
        ("1.2e-17", "3.4e-18", True),
        ("1.5e999", "1.5", False),
    ],
)
def test_printed_numbers_may_differ_in_their_last_digit(left: str, right: str, same: bool) -> None:
    assert same_printed(left, right, 1e-6) == same


def test_no_number_is_near_another() -> None:
    assert is_near(math.nan, math.nan, 0.1, 0.0)
    assert is_near(math.inf, math.inf, 0.1, 0.0)
    assert not is_near(math.nan, 1.0, 0.1, 0.0)
    assert not is_near(-math.inf, math.inf, 0.1, 0.0)
