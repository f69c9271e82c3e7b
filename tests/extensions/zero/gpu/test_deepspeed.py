"""``backend="deepspeed"`` on a CUDA device. Skipped where there is none, or no DeepSpeed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


def train() -> dict[str, Any]:
    """A program that knows neither of DeepSpeed nor of half precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.rand(64, 8)
    losses = []
    for inputs, targets in DataLoader(TensorDataset(x, x.prod(dim=1, keepdim=True)), batch_size=16):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.cuda()).float(), targets.cuda())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [p.detach().float().flatten().cpu() for p in model.parameters()]
    return {"losses": losses, "weights": torch.cat(weights)}


@pytest.mark.parametrize("zero_lvl", [0, 2, 3])
@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-4), ("bf16", 2e-2), ("fp16", 2e-2)])
def test_an_engine_on_the_gpu_trains_as_a_plain_loop(zero_lvl: Any, precision: str, limit: float) -> None:
    settings: dict[str, Any] = {"deepspeed_config": {"fp16": {"enabled": True}}} if precision == "fp16" else {}
    settings |= {"mixed_precision": "bf16"} if precision == "bf16" else {}
    config = TorchDistributedConfig(world_size=1, launcher="local", backend="deepspeed", zero_lvl=zero_lvl, **settings)
    result, plain = experiment.lagom(train, config), train()
    assert result["losses"] == pytest.approx(plain["losses"], abs=limit)
    # A loss scaler may skip first steps; losses say that they train.
    if precision != "fp16":
        torch.testing.assert_close(result["weights"], plain["weights"], rtol=limit, atol=limit)
