"""Differences to the base and their confidence intervals."""

from __future__ import annotations

import pytest

from lagom.extensions.search.effects import effect, t_quantile


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (100, 1.984)])
def test_students_quantiles_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees, 0.95) == pytest.approx(value, abs=5e-4)


def test_effects_are_paired_by_seed_and_have_no_interval_from_one() -> None:
    found = effect("x", {0: 1.0, 1: 2.0, 2: 9.0}, {0: 0.5, 1: 1.5})
    assert (found.difference, found.low, found.high, found.num_seeds) == (-0.5, -0.5, -0.5, 2)
    alone = effect("x", {0: 1.0}, {0: 3.0})
    assert (alone.difference, alone.low, alone.high) == (2.0, None, None)
    assert effect("x", {0: 1.0}, {}).difference is None
    assert effect("x", {}, {0: 2.0}).value == 2.0
