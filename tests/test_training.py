"""Ordinary loops, end to end on this machine: weights after training are those of one process, to 1e-12."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lagom import experiment
from lagom.config import TorchDistributedConfig
from tests.training_programs import (
    DATA,
    metrics,
    network,
    weights,
    with_init_applied_after_construction,
    with_scheduler_groups_and_clipping,
)

PROGRAMS = (with_scheduler_groups_and_clipping, with_init_applied_after_construction)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(
    "program",
    [PROGRAMS[0], pytest.param(PROGRAMS[1], marks=pytest.mark.soak)],  # tests/programs/siamese.py does so too
)
def test_an_ordinary_loop_ends_with_the_weights_of_one_process(
    program: Callable[[], dict[str, Any]], world_size: int
) -> None:
    torch.manual_seed(0)
    plain = program()
    torch.manual_seed(0)
    result = experiment.lagom(program, TorchDistributedConfig(launcher="local", world_size=world_size))
    if world_size == 1:
        assert torch.equal(result["weights"], plain["weights"])
    for name, value in plain.items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
def test_metrics_of_a_test_set_are_those_of_one_process(world_size: int) -> None:
    torch.manual_seed(0)
    plain = metrics()
    assert 0 < plain["auc"] < 1
    torch.manual_seed(0)
    result = experiment.lagom(metrics, TorchDistributedConfig(launcher="local", world_size=world_size))
    assert result.value == pytest.approx(plain, rel=1e-12)
    assert all(value == result.value for value in result.per_rank)


def test_a_loader_and_a_model_of_the_notebook_are_shared_out_and_synchronised() -> None:
    """They exist before the call, and reach the function by pickle, as its globals do."""
    model = network()
    loader = DataLoader(DATA, batch_size=7, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)

    def train() -> dict[str, Any]:
        seen = 0
        for inputs, targets in loader:
            seen += len(inputs)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return {"weights": weights(model), "seen": seen}

    torch.manual_seed(0)
    result = experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2, batches="split"))
    assert torch.equal(weights(model), before)  # the notebook's own stays as it was
    assert [part["seen"] for part in result.per_rank] == [30, 23]  # of 8 batches, the last of 4
    torch.manual_seed(0)
    plain = train()
    torch.testing.assert_close(result.per_rank[0]["weights"], plain["weights"], rtol=1e-12, atol=1e-12)
    assert torch.equal(result.per_rank[0]["weights"], result.per_rank[1]["weights"])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])  # two show it
def test_ranks_start_where_the_callers_generators_stand_and_these_go_on_as_after_a_plain_call(world_size: int) -> None:
    def train() -> tuple[float, float, float, torch.Tensor]:
        model = torch.nn.Sequential(network(), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in DataLoader(DATA, batch_size=10, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return torch.rand(1).item(), float(np.random.rand()), random.random(), weights(model)

    def seeded(call: Callable[[], Any]) -> list[Any]:
        torch.manual_seed(42)
        np.random.seed(43)
        random.seed(44)
        return [call(), call(), (torch.rand(1).item(), float(np.random.rand()), random.random())]

    plain = seeded(train)
    config = TorchDistributedConfig(launcher="local", world_size=world_size)
    found = seeded(lambda: experiment.lagom(train, config).value)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_a_trained_model_comes_home_with_its_own_type() -> None:
    def train() -> torch.nn.Module:
        model = network()
        for inputs, targets in DataLoader(DATA, batch_size=16):
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
        return model

    result = experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2))
    assert type(result.per_rank[1]) is torch.nn.Sequential
    assert list(result.value.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
