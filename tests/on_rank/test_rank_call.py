"""``RankCall``: what a notebook defines in ``__main__`` is found there on a rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig

CELLS = """
import functools
import multiprocessing

class Row:
    def __init__(self, value):
        self.value = value

    def doubled(self):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(double, (self,))

def double(row):
    return Row(2 * value_of(row))

def value_of(row):
    return row.value

def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@logged
def triple(row):
    return Row(3 * value_of(row))

def train(chosen, times=1):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        rows = pool.map(double, [Row(1), Row(2)]) + pool.map(triple, [Row(1)]) + pool.map(chosen, [Row(5)])
    return times * (sum(row.value for row in rows) + Row(100).doubled().value)

def chosen_by_hparams(row):
    return Row(row.value + 1)
"""


@pytest.mark.parametrize("wrapped", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_pool_that_the_program_forks_finds_functions_and_classes_of_main(wrapped: bool) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(CELLS, scope)
    train = functools.partial(scope["train"], times=10) if wrapped else scope["train"]
    config = TorchDistributedConfig(
        world_size=2, launcher="local", run_dir=None, hparams={"chosen": scope["chosen_by_hparams"]}
    )
    result = experiment.lagom(train, config)
    assert repr(result).startswith("Result of train:")
    assert result.value == (10 if wrapped else 1) * (2 + 4 + 3 + 6 + 200)
