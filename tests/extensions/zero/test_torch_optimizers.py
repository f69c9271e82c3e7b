"""Every optimizer of torch at every ``zero_lvl``, with the inputs of torch's own tests (``optim_db``).

Weights and states are those of one process, and an optimizer is sharded, or the log or an error says why it is not.
Left out are ``differentiable``, with which no optimizer steps a module's parameters, and ``capturable``, for GPUs only.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import LagomError
from lagom.extensions.zero.parameters.shards import MIN_ELEMENTS
from lagom.extensions.zero.sharded_state import ShardedState
from lagom.run_state.random_streams import seed_everything
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import alone, lagom_log, run_ranks

LEVELS = (0, 1, 2, 3)
WIDTH = 72
_MOST_CELLS = 8
"""Most runs in one launch, which ends after 120 s."""
BY_PARAMETER = ("Adafactor", "Muon")
# Adagrad of older torch cannot make its state anew.
_REMAKES_STATE = "initial_accumulator_value" in inspect.getsource(torch.optim.Adagrad._init_group)
WHOLE = ("LBFGS", "SparseAdam") if _REMAKES_STATE else ("LBFGS", "SparseAdam", "Adagrad")
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)


class Setting(NamedTuple):
    """An optimizer of torch with the arguments of one test of torch."""

    name: str
    arguments: dict[str, Any]


class Outcome(NamedTuple):
    """What a program ends with, and how its optimizer was stepped."""

    weights: list[torch.Tensor]
    state: dict[int, Any]
    error: str
    is_sharded: bool
    said: list[str]


def torch_tests() -> dict[str, Any]:
    """Return what torch's tests know of each optimizer; the import takes 3 s and changes sys.path."""
    before = sys.path[:]
    from torch.testing._internal.common_optimizers import optim_db

    sys.path[:] = before
    return {one.name: one for one in optim_db}


def settings(name: str) -> list[Setting]:
    """Each input of torch's tests, as it is and in each implementation that the optimizer has on a CPU."""
    info = torch_tests()[name]
    ways: list[dict[str, bool]] = [{}]
    ways += [{way: True} for way in ("foreach", "fused") if way in info.supported_impls]
    ways += [{"foreach": False}] if "foreach" in info.supported_impls else []
    inputs = [one.kwargs for one in info.optim_inputs_func("cpu")]
    return [Setting(name, kwargs | way) for kwargs in inputs for way in ways if not set(way) & set(kwargs)]


class Words(nn.Module):
    """A model with sparse gradients alone, and one parameter that is large enough for level 3."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(MIN_ELEMENTS // 2 + 1, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((x[:, :3] * 10).long().abs()).sum((1, 2))
        return found.unsqueeze(1)


def _model(name: str) -> nn.Module:
    if name == "SparseAdam":
        return Words()
    return nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def train(setting: Setting) -> Outcome:
    """An ordinary program: two epochs of two batches, the last one shorter."""
    seed_everything(0)
    said = lagom_log()
    x = torch.randn(11, 7, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=6, shuffle=True)
    model = _model(setting.name).double()
    trained = [p for p in model.parameters() if p.dim() == 2 or setting.name != "Muon"]
    error, is_sharded, state = "", False, {}
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in setting.arguments.items()}
    if setting.name == "LBFGS":
        arguments["max_iter"] = 3  # with more, it makes differences of rounding larger by a million
    try:
        optimizer: Optimizer = getattr(torch.optim, setting.name)(trained, **arguments)
        for _ in range(2):
            for inputs, targets in loader:
                step(model, optimizer, inputs, targets, closure=setting.name == "LBFGS")
        is_sharded = isinstance(vars(optimizer)["state"], ShardedState)
        state = optimizer.state_dict()["state"]
    except (LagomError, RuntimeError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Outcome([p.detach().clone() for p in model.parameters()], state, error, is_sharded, list(said))


def step(model: nn.Module, optimizer: Optimizer, inputs: torch.Tensor, targets: torch.Tensor, *, closure: bool) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = F.mse_loss(model(inputs), targets)
        found.backward()
        return found

    if closure:
        optimizer.step(loss)  # type: ignore[arg-type]
    else:
        loss()
        optimizer.step()


def on_ranks(cells: Sequence[tuple[int, Setting]]) -> Callable[[Session], list[Outcome]]:
    """Each level and setting as a run of its own, one after another on the same ranks."""

    def run(session: Session) -> list[Outcome]:
        found = []
        for level, setting in cells:
            own = {f.name: getattr(session, f.name) for f in dataclasses.fields(session) if f.init}
            with patched(Session(**own | {"plan": session.plan.with_config(zero_lvl=level)})):
                found.append(train(setting))
        return found

    return run


def check(world_size: int, every: Sequence[Setting], levels: Sequence[int] = LEVELS) -> None:
    """Compare each setting, at each of ``levels`` and on each rank, with the same program in one plain process."""
    wanted = alone(lambda _: [train(setting) for setting in every])
    assert sum(bool(one.error) for one in wanted) <= len(every) // 4, [one.error for one in wanted]
    cells = [(level, place) for level in levels for place in range(len(every))]
    for start in range(0, len(cells), _MOST_CELLS):
        some = cells[start : start + _MOST_CELLS]
        run = on_ranks([(level, every[place]) for level, place in some])
        for rank, outcomes in enumerate(run_ranks(world_size, run, patches=False, batches="whole")):
            for (level, place), found in zip(some, outcomes, strict=True):
                compare(level, every[place], found, wanted[place], f"rank {rank} at level {level}: {every[place]}")


def compare(level: int, setting: Setting, found: Outcome, plain: Outcome, place: str) -> None:
    refused = level == 3 and setting.name in BY_PARAMETER and not plain.error
    if plain.error or refused:
        expected = "steps by whole parameters" if refused else plain.error
        assert expected in found.error, place
        return
    assert not found.error, (place, found.error)
    # LBFGS keeps quotients of differences between gradients, of which cancellation takes some digits.
    in_state = 1e-7 if setting.name == "LBFGS" else 1e-9
    for ours, theirs, rtol in ((found.weights, plain.weights, 1e-9), (found.state, plain.state, in_state)):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-11, msg=lambda text: f"{place}: {text}")
    if level:
        assert found.is_sharded is (setting.name not in WHOLE), place
        assert any("stepped whole on each" in line for line in found.said) is not found.is_sharded, (place, found.said)


def test_the_weights_are_those_of_one_process() -> None:
    sgd = Setting("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True})
    adagrad = Setting("Adagrad", {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1, "fused": True})
    check(2, [sgd, adagrad, Setting("Adafactor", {"lr": 0.01}), Setting("LBFGS", {})])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_so_are_those_of_every_optimizer_of_torch(name: str, level: int, world_size: int) -> None:
    check(world_size, settings(name), [level])


@pytest.mark.soak
def test_torch_tests_every_optimizer_that_it_has() -> None:
    assert sorted(torch_tests()) == NAMES
