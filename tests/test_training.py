"""Ordinary loops, end to end on this machine: weights after training are those of one process, to 1e-12."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

POINTS = torch.rand(53, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))


def network() -> torch.nn.Sequential:
    """Two layers, in float64."""
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def with_scheduler_groups_and_clipping() -> dict[str, Any]:
    """Two parameter groups, one added later, a scheduler per batch and one per epoch, and the norm clipped."""
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loader = DataLoader(DATA, batch_size=8, shuffle=True)
    norms = []
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            cosine.step()
        model.eval()
        with torch.no_grad():
            plateau.step(torch.nn.functional.mse_loss(model(POINTS), DATA.tensors[1]).item())
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"weights": weights(model), "rates": rates, "norms": norms, "steps": len(norms)}


def with_init_applied_after_construction() -> dict[str, Any]:
    """Parameters drawn anew, by ``apply`` and by hand, after model and optimizer exist."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def init(part: torch.nn.Module) -> None:
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.3)

    model.apply(init)
    with torch.no_grad():
        next(model[0].parameters()).copy_(torch.rand(8, 3))
    for inputs, targets in DataLoader(DATA, batch_size=10, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return {"weights": weights(model)}


PROGRAMS = (with_scheduler_groups_and_clipping, with_init_applied_after_construction)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("program", PROGRAMS)
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


def metrics() -> dict[str, float]:
    """Four ways to judge a model on a test set, the last of which no mean over shares could give."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in DataLoader(DATA, batch_size=9, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    total, correct, batches, scores, labels = 0.0, 0, 0, [], []
    with torch.no_grad():
        for inputs, targets in DataLoader(DATA, batch_size=10):
            outputs = model(inputs)
            total += torch.nn.functional.mse_loss(outputs, targets, reduction="sum").item()
            correct += int(((outputs > 0.125) == (targets > 0.125)).sum())
            batches += 1
            scores.append(outputs.flatten())
            labels.append((targets > 0.125).flatten())
    score, label = torch.cat(scores), torch.cat(labels)
    above = (score[label].unsqueeze(1) > score[~label].unsqueeze(0)).double()  # Mann and Whitney's form of the AUC
    return {"sum": total, "mean": total / batches, "accuracy": correct / len(DATA), "auc": above.mean().item()}


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
