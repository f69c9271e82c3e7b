"""torch's compiler in ranks: imported by their server, with torch's own functions in its tables."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.patching.replace import originals, replaced
from tests.ranks import alone


def run(function: Any, world_size: int = 2, **hparams: Any) -> Any:
    config = TorchDistributedConfig(launcher="local", world_size=world_size, hparams=hparams)
    return experiment.lagom(function, config).per_rank


def train(compiles: bool) -> tuple[list[torch.Tensor], float]:
    """Weights, and a loss of an evaluation."""
    warnings.simplefilter("ignore")  # torch.compile warns of its own modules
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    if compiles:
        model.compile(backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(22, 4).double(), torch.randint(3, (22,)))
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    return [tensor.detach().clone() for tensor in model.state_dict().values()], loss


def plainly(compiles: bool, _: object) -> tuple[list[torch.Tensor], float]:
    return train(compiles)


def test_programs_that_compile_have_the_weights_of_one_process() -> None:
    for compiles in (False, True):
        weights, loss = alone(partial(plainly, compiles))
        for found, found_loss in run(train, compiles=compiles):
            assert found_loss == pytest.approx(loss, abs=1e-12)
            for mine, wanted in zip(found, weights, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def test_no_rank_imports_it_by_itself() -> None:
    assert run(lambda: "torch._dynamo.convert_frame" in sys.modules) == (True, True)


def test_public_functions_are_put_back_for_a_while() -> None:
    first: Any = len
    second: Any = sum
    before = nn.functional.relu
    with replaced(nn.functional, "relu", first), replaced(nn.functional, "relu", second):
        with (
            replaced(nn.ReLU, "forward", first),
            replaced(torch.autograd, "_engine_run_backward", first),
            replaced(sys, "breakpointhook", first),
            originals("torch"),
        ):
            assert nn.functional.relu is before
            for left in nn.ReLU.forward, torch.autograd._engine_run_backward, sys.breakpointhook:
                assert left is first
        assert nn.functional.relu is second
    assert nn.functional.relu is before
