"""``zero_lvl`` 1 and 2: weights, states and what a program does with an optimizer are those of one process."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import alone, run_ranks

Make = Callable[[nn.Module], Optimizer]


class Softsign(Optimizer):
    """A third party's: elementwise, with state that torch does not know."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["num"] = torch.zeros_like(p), 0
                state["num"] += 1
                state["mean"].mul_(group["beta"]).add_(p.grad)
                p.add_(F.softsign(state["mean"]), alpha=-group["lr"] / state["num"])


class Normed(Optimizer):
    """A third party's: every parameter by its own norm, as LARS has it."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["norms"] = [*self.state[p].get("norms", []), float(p.grad.norm())]
                    p.add_(p.grad / (p.grad.norm() + 1e-3), alpha=-group["lr"])


class Clipped(Optimizer):
    """A third party's: all parameters by the norm of all."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


def _two_groups(model: nn.Module) -> Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.03}]
    return AdamW(groups, lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda model: SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: Adam(model.parameters(), 0.01, amsgrad=True),
    "adamw": _two_groups,
    "changes gradients": lambda model: SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, foreach=True),
    "elementwise": lambda model: Softsign(model.parameters()),
    "by parameter": lambda model: Adafactor(model.parameters(), 0.02),
    "normed": lambda model: Normed(model.parameters()),
    "coupled": lambda model: Clipped(model.parameters()),
}


def _model() -> nn.Sequential:
    torch.set_default_dtype(torch.float64)
    return nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))


def _loader() -> DataLoader[Any]:
    x = torch.randn(23, 7)
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=5, shuffle=True)


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained(make: Make) -> Callable[[Session], Any]:
    """Two epochs with a scheduler, clipping and accumulation."""

    def train(_: Session) -> Any:
        model, loader = _model(), _loader()
        optimizer = make(model)
        scheduler = StepLR(optimizer, 3, 0.7)
        metric = 0.0
        for epoch in range(2):
            for i, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if epoch == 0 or i % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    if i:
                        optimizer.zero_grad()
            with torch.no_grad():
                metric = sum(F.mse_loss(model(x), y).item() for x, y in loader)
        return _weights(model), optimizer.state_dict(), metric

    return train


def close(found: Any, wanted: Any, path: str = "") -> None:
    """Assert that what ``found`` holds are the keys and, to 1e-12, the numbers of ``wanted``."""
    if isinstance(wanted, torch.Tensor):
        assert found.shape == wanted.shape, path
        assert found.dtype == wanted.dtype, path
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12), path
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key, value in wanted.items():
            close(found[key], value, f"{path}/{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), path
        for i, value in enumerate(wanted):
            close(found[i], value, f"{path}/{i}")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-11, abs=1e-12), path
    else:
        assert found == wanted, path


def same(train: Callable[[Session], Any], *cases: tuple[int, int], **options: Any) -> None:
    """Assert that every rank gets what one process gets without lagom; for levels and numbers of ranks."""
    wanted = alone(train)
    for level, world_size in cases or ((1, 2), (2, 2)):
        for found in run_ranks(world_size, train, zero_lvl=level, **options):
            close(found, wanted)


CASES = {
    "adamw": [(1, 2), (1, 3), (2, 2), (2, 3)],
    "by parameter": [(1, 2), (2, 3)],
    "normed": [(1, 3)],
    "coupled": [(2, 2)],
}
BY_DEFAULT = ("normed",)
"""It steps each parameter by itself. Tests below step each element, test_sharded_parameters.py all at once."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.soak) for name in OPTIMIZERS],
)
def test_weights_states_and_metrics_are_those_of_one_process(name: str) -> None:
    same(trained(OPTIMIZERS[name]), *CASES.get(name, [(1, 2), (2, 2)]))


@pytest.mark.parametrize("name", ["sgd", "by parameter"])
def test_one_rank_has_the_very_bits(name: str) -> None:
    train = trained(OPTIMIZERS[name])
    wanted, found = alone(train), run_ranks(1, train, zero_lvl=1)[0]
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    assert found[2] == wanted[2]


@pytest.mark.parametrize("evaluation", ["replicated", pytest.param("sharded", marks=pytest.mark.soak)])
def test_whole_batches_and_every_evaluation(evaluation: Any) -> None:
    def train(session: Session) -> Any:
        found = trained(OPTIMIZERS["adam"])(session)
        return found if evaluation == "replicated" else found[:2]

    same(train, (1 if evaluation == "sharded" else 2, 2), batches="whole", evaluation=evaluation)


@pytest.mark.soak  # tests/gradients/test_accumulation.py has such batches
def test_batches_of_each_rank() -> None:
    def train(session: Session) -> Any:
        model, x = _model(), torch.randn(24, 7)
        loader = DataLoader(TensorDataset(x), batch_size=6 // session.world_size)
        optimizer = Adam(model.parameters(), 0.01)
        for (part,) in loader:
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
        return _weights(model)

    wanted = alone(train)
    for found in run_ranks(2, train, zero_lvl=2, batches="per_rank"):
        close(found, wanted)


@pytest.mark.soak  # tests/test_examples.py counts what ranks hold at each level
def test_each_rank_holds_its_part_of_the_state_only() -> None:
    def train(session: Session) -> Any:
        model = _model()
        optimizer = Adam(model.parameters(), 0.01)
        model(torch.randn(4, 7)).mean().backward()
        optimizer.step()
        held = vars(optimizer)["state"].num_bytes()
        names = [group["params"] == list(model.parameters()) for group in optimizer.param_groups]
        return held, sum(p.nbytes for p in model.parameters()), names

    for world_size in (2, 3):
        rows = run_ranks(world_size, train, zero_lvl=1)
        whole = 2 * rows[0][1]
        assert whole <= sum(held for held, *_ in rows) < 1.05 * whole
        assert all(held < 1.15 * whole / world_size for held, *_ in rows)
        assert all(names == [True] for *_, names in rows)


@pytest.mark.parametrize("case", [pytest.param((1, 2), marks=pytest.mark.soak), (2, 3)])  # level 2 has states as 1 has
def test_what_is_done_with_an_optimizer_between_steps(case: tuple[int, int]) -> None:
    """A new group, state that is looked at, changed, loaded and copied, a parameter that gets gradients later."""

    def train(_: Session) -> Any:
        model, late = _model(), nn.Parameter(torch.full((70,), 0.5, dtype=torch.float64))
        idle = nn.Parameter(torch.ones(200, dtype=torch.float64))
        optimizer = Adam([*list(model.parameters())[:2], idle], 0.01)
        x = torch.randn(6, 7)

        def step(one: Optimizer, extra: Any = 0.0) -> None:
            one.zero_grad()
            (model(x).square().mean() + extra).backward()
            one.step()

        step(optimizer)
        seen = [sorted(optimizer.state[next(model.parameters())]), len(optimizer.state)]
        optimizer.add_param_group({"params": [*list(model.parameters())[2:], late], "lr": 0.05})
        step(optimizer, (late**2).sum())
        step(optimizer, (idle**2).sum())
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        step(optimizer)
        kept = copy.deepcopy(optimizer.state_dict())
        step(optimizer)
        optimizer.load_state_dict(kept)
        step(optimizer)
        other = copy.deepcopy(model)
        fresh = Adam(other.parameters(), 0.01)
        fresh.load_state_dict(SGD(other.parameters(), 0.5).state_dict() | {"state": {}})
        twin_model, twin = copy.deepcopy((model, optimizer))
        twin.zero_grad()
        twin_model(x).square().sum().backward()
        twin.step()
        step(optimizer)
        stream = io.BytesIO()
        torch.save(optimizer.state_dict(), stream)
        stream.seek(0)
        saved = torch.load(stream)
        again = pickle.loads(pickle.dumps(optimizer))
        return seen, _weights(model), _weights(twin_model), saved, again.state_dict(), twin.state_dict()

    same(train, case)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, 2), (2, 3)),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in (((2, 3), (1, 1)), ((0, 2), (1, 2)))),
    ],
)
def test_a_state_goes_on_at_another_world_size(first: tuple[int, int], second: tuple[int, int]) -> None:
    def train(start: Any) -> Callable[[Session], Any]:
        def run(_: Session) -> Any:
            model = _model()
            optimizer = OPTIMIZERS["adamw"](model)
            if start is not None:
                model.load_state_dict(start[0])
                optimizer.load_state_dict(start[1])
            for x in torch.arange(42.0).sin().view(2, 3, 7):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            return model.state_dict(), optimizer.state_dict()

        return run

    wanted = alone(train(alone(train(None))))
    middle = run_ranks(first[1], train(None), zero_lvl=first[0])[0]
    for found in run_ranks(second[1], train(middle), zero_lvl=second[0]):
        close(found, wanted)


@pytest.mark.parametrize("zero_lvl", [pytest.param(1, marks=pytest.mark.soak), 2])  # level 2 has states as 1 has
def test_closures_scalers_and_several_optimizers(zero_lvl: int) -> None:
    def train(_: Session) -> Any:
        model, critic = _model(), _model()
        by_closure, lbfgs = (
            SGD(model.parameters(), 0.1, momentum=0.9),
            torch.optim.LBFGS(critic.parameters(), 0.1, max_iter=4),
        )
        losses = []
        for x, y in _loader():

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                by_closure.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            def curved(x: Any = x, y: Any = y) -> torch.Tensor:
                lbfgs.zero_grad()
                loss = F.mse_loss(critic(x), y)
                loss.backward()
                return loss

            by_closure.step(closure)
            losses.append(len(by_closure.param_groups[0]["params"]))
            lbfgs.step(curved)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        adam = Adam(model.parameters(), 0.01)
        schedule = OneCycleLR(adam, 0.1, total_steps=20)
        for x, y in _loader():
            adam.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.unscale_(adam)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(adam)
            scaler.update()
            schedule.step()
        return losses, _weights(model), _weights(critic), by_closure.state_dict(), schedule.get_last_lr()

    same(train, (zero_lvl, 2))


@pytest.mark.soak  # tests/optimizers/test_step_ranges.py has such hooks and decorators
def test_hooks_and_a_decorator_around_a_step_are_called_as_often_as_in_one_process() -> None:
    def train(_: Session) -> Any:
        class Base(Optimizer):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad, alpha=0.1)

        class Own(Base):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                super().step(closure)

        torch.manual_seed(0)
        model, calls = _model(), list[str]()
        Own(model.parameters(), {})  # torch wraps the step of the class for its hooks now
        original = Own.step

        @functools.wraps(original)
        def timed(self: Own, *args: Any) -> Any:
            calls.append("decorator")
            return original(self, *args)

        Own.step = timed  # type: ignore[method-assign,assignment]
        optimizer = Own(model.parameters(), {})
        optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
        for x in torch.arange(42.0).sin().view(2, 3, 7):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return _weights(model), calls

    wanted = alone(train)
    assert wanted[1] == ["decorator", "hook"] * 2
    for found in run_ranks(2, train, zero_lvl=1):
        close(found, wanted)
