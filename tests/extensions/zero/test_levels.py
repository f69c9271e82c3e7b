"""Every ``zero_lvl`` on both backends: the weights after an epoch and the returned metric are those of level 0.

A table of four levels, two backends, 1 to 3 ranks and four optimizers. By default run: with DeepSpeed one optimizer at
each level on 1 and 2 ranks, in float32. ``python -m pytest -m soak tests/extensions/zero/test_levels.py`` runs the
rest. By default tests/test_examples.py trains at each level of ``backend="torch"``, and this folder in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from lagom.extensions.zero import Backend
from lagom.extensions.zero.deepspeed.loading import load
from lagom.extensions.zero.parameters.shards import MIN_ELEMENTS
from lagom.run_state.random_streams import seed_everything
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import alone, run_ranks

LEVELS = (0, 1, 2, 3)
WORLDS = (1, 2, 3)
WIDTH = 72
"""Width of the layers; its square is a parameter that level 3 shards."""
Cell = tuple[int, str, torch.dtype]
"""Level, optimizer and type of numbers."""


class Lion(Optimizer):
    """A third party's."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    p.add_(F.softsign(mean), alpha=-group["lr"])


def _two_groups(model: nn.Module) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.03},
    ]
    return AdamW(groups, lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD with momentum": lambda model: SGD(model.parameters(), 0.05, momentum=0.9),
    "Adam": lambda model: Adam(model.parameters(), 0.01),
    "AdamW, two groups": _two_groups,
    "a third party's": lambda model: Lion(model.parameters(), 0.05),
}


def epoch(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """An ordinary program, with a scheduler, a tail that cannot be dealt out evenly, and a metric."""
    x = torch.randn(11, 7, dtype=dtype)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=6, shuffle=True)
    model = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model.to(dtype)
    optimizer = OPTIMIZERS[name](model)
    scheduler = StepLR(optimizer, 2, 0.7)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        metric = sum(F.mse_loss(model(inputs), targets, reduction="sum").item() for inputs, targets in loader)
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return {"weights": weights, "metric": metric, "lr": scheduler.get_last_lr()}


def cells(session: Session, table: Sequence[Cell], backend: Backend) -> list[dict[str, Any]]:
    """Each as a run of its own, on these ranks."""
    found = []
    for level, name, dtype in table:
        plan = session.plan.with_config(zero_lvl=level, backend=backend)
        own = {f.name: getattr(session, f.name) for f in dataclasses.fields(session) if f.init}
        with patched(Session(**own | {"plan": plan})):
            seed_everything(0)
            found.append(epoch(name, dtype))
    return found


def judged(world_size: int, table: Sequence[Cell], backend: Backend) -> None:
    """Each cell on each rank by the same program in one process, without lagom."""

    kinds = list(dict.fromkeys((name, dtype) for _level, name, dtype in table))

    def plain(_: Session) -> list[dict[str, Any]]:
        rows = []
        for name, dtype in kinds:
            seed_everything(0)
            rows.append(epoch(name, dtype))
        return rows

    found = dict(zip(kinds, alone(plain), strict=True))
    wanted = [found[name, dtype] for _level, name, dtype in table]
    for rank, rows in enumerate(run_ranks(world_size, lambda s: cells(s, table, backend), patches=False)):
        for cell, row, expected in zip(table, rows, wanted, strict=True):
            # Adam divides a gradient by its own size, so the rounding of a small one in float32 moves a weight further.
            limit = 1e-12 if cell[2] is torch.float64 else 1e-5 if "Adam" in cell[1] else 1e-6
            assert row["lr"] == expected["lr"]
            for key, value in expected["weights"].items():
                off = float((row["weights"][key] - value).abs().max())
                assert off <= limit * max(1, float(value.abs().max())), (rank, cell, key, off)
            assert row["metric"] == pytest.approx(expected["metric"], rel=10 * limit), (rank, cell)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Import DeepSpeed once, before ranks are forked, and not in each of them."""
    load("cpu")


def _turn(level: int, world_size: int) -> str:
    """Each optimizer comes by at each world."""
    return list(OPTIMIZERS)[(level + world_size) % len(OPTIMIZERS)]


@pytest.mark.soak  # tests/test_examples.py trains at each level; tests/optimizers and tests/extensions/zero in float64
def test_on_torch() -> None:
    assert WIDTH**2 > MIN_ELEMENTS
    table = [(level, name, torch.float64) for place, name in enumerate(OPTIMIZERS) for level in LEVELS[place % 2 :: 2]]
    judged(2, table, "torch")


@pytest.mark.soak  # half of it above
@pytest.mark.parametrize("world_size", WORLDS)
def test_on_torch_with_every_optimizer_at_every_level(world_size: int) -> None:
    judged(world_size, [(level, name, torch.float64) for level in LEVELS for name in OPTIMIZERS], "torch")


@pytest.mark.soak  # with DeepSpeed by default
@pytest.mark.parametrize("world_size", WORLDS)
def test_on_torch_in_single_precision(world_size: int) -> None:
    judged(world_size, [(level, _turn(level, world_size), torch.float32) for level in LEVELS], "torch")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_on_deepspeed(world_size: int, level: int) -> None:
    judged(world_size, [(level, _turn(level, world_size), torch.float32)], "deepspeed")


@pytest.mark.soak
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_on_deepspeed_with_every_optimizer(world_size: int, level: int, name: str) -> None:
    judged(world_size, [(level, name, torch.float32)], "deepspeed")
