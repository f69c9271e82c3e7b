"""``restored_state``: a probe leaves every object that a forward can reach as one process would leave it."""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lagom.forward.rows.restore import ChangedError, restored_state
from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.forward.rows.held_objects import HELD, Held, refuse
from tests.ranks import alone, run_ranks

_HELD: Any = None
_USE: Any = None
ROLES = ("attribute", "global", "cell", "argument", "output")


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


class WithAttribute(nn.Module):
    def __init__(self, held: Any, use: Any) -> None:
        super().__init__()
        self.body, self.use = body(), use
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        vars(self)["held"] = held  # torch would ask for its class

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.body(x) * self.use(vars(self)["held"], len(x))


class WithGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, x: Tensor) -> Any:
        return self.body(x) * _USE(_HELD, len(x))


class WithArgument(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.body, self.use = body(), use

    def forward(self, x: Tensor, held: Any) -> Any:
        return self.body(x) * self.use(held, len(x))


class WithOutput(nn.Module):
    def __init__(self, held: Any, use: Any) -> None:
        super().__init__()
        self.body, self.use = body(), use
        vars(self)["held"] = held

    def forward(self, x: Tensor) -> Any:
        held = vars(self)["held"]
        return self.body(x) * self.use(held, len(x)), held


def make_model(role: str, held: Any, use: Any) -> nn.Module:
    global _HELD, _USE
    if role == "attribute":
        return WithAttribute(held, use)
    if role == "global":
        _HELD, _USE = held, use
        return WithGlobal()
    if role == "argument":
        return WithArgument(use)
    if role == "output":
        return WithOutput(held, use)

    class WithCell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body()

        def forward(self, x: Tensor) -> Any:
            return self.body(x) * use(held, len(x))

    return WithCell()


def trained(case: Held, role: str) -> Any:
    """Train a model whose forward uses the object; return losses, weights and what has become of the object."""
    held = case.make()
    return train(make_model(role, held, case.use), case, held, role)


def train(model: nn.Module, case: Held, held: Any, role: str) -> Any:
    seed_everything(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _step in range(3):
        x = torch.randn(8, 5, dtype=torch.float64)
        output = model(x, held) if role == "argument" else model(x)
        loss = (output[0] if role == "output" else output).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *[tensor.double().sum().item() for tensor in model.state_dict().values()]], case.show(held)


def everything(_: Session, *, all_roles: bool = False) -> dict[str, Any]:
    """Use each object in one role, or in all."""
    return {
        f"{name}-{role}": trained(case, role)
        for number, (name, case) in enumerate(HELD.items())
        for role in (ROLES if all_roles else (ROLES[number % len(ROLES)],))
    }


@cache
def results(world_size: int, all_roles: bool) -> list[dict[str, Any]]:
    program = partial(everything, all_roles=all_roles)
    if world_size == 1:
        return [alone(program)]
    return run_ranks(world_size, program, batches="whole", always_slices=True)


@pytest.mark.parametrize(
    ("world_size", "all_roles"),
    [(2, False), pytest.param(2, True, marks=pytest.mark.soak), pytest.param(3, False, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("name", HELD)
def test_an_object_that_a_forward_uses_is_as_after_one_process(name: str, world_size: int, all_roles: bool) -> None:
    (wanted,) = results(1, all_roles)
    places = [place for place in wanted if place.rpartition("-")[0] == name]
    assert places
    for place, found in itertools.product(places, results(world_size, all_roles)):
        assert found[place][0] == pytest.approx(wanted[place][0], rel=1e-10, abs=1e-12), place
        assert found[place][1] == wanted[place][1], place


class ReadOnly(dict[str, float]):
    """A dict that refuses what it inherits."""

    clear = update = __setitem__ = refuse


class Configured(nn.Module):
    """A model with a read-only config, a buffer that does not depend on the batch, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.body = ReadOnly(scale=2.0), body()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.last = "second" if int(self.calls) > 1 else "first"
        return self.body(x) * self.config.get("scale", 1.0)


def configured(session: Session) -> Any:
    model = Configured()
    held = Held(lambda: None, lambda *_: None, lambda _: (dict(model.config), model.calls.item(), model.last))
    return train(model, held, None, "attribute"), sorted(text for text in session.said if "whole" in text)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_read_only_dict_keeps_its_items_and_the_model_is_split(world_size: int) -> None:
    (numbers, held), _ = alone(configured)
    assert held == ({"scale": 2.0}, 3, "second")
    for (found, found_held), said in run_ranks(world_size, configured, batches="whole", always_slices=True):
        assert found == pytest.approx(numbers, rel=1e-10, abs=1e-12)
        assert found_held == held
        assert said == []


class Sized(nn.Module):
    """A model that keeps the number of rows of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rows = body(), 0

    def forward(self, x: Tensor) -> Any:
        self.rows = len(x)
        return self.body(x)


def test_a_module_that_keeps_the_number_of_rows_runs_whole() -> None:
    def sized(session: Session) -> Any:
        model = Sized()
        held = Held(lambda: None, lambda *_: None, lambda _: model.rows)
        return train(model, held, None, "attribute"), [text for text in session.said if "for a part of its" in text]

    (numbers, rows), _ = alone(sized)
    assert rows == 8
    for (found, found_rows), said in run_ranks(2, sized, batches="whole", always_slices=True):
        assert found == pytest.approx(numbers, rel=1e-10, abs=1e-12)
        assert found_rows == rows
        assert len(said) == 1


class Sealed(np.random.PCG64):
    """A source of random bits that does not give its state."""

    state = property(refuse)


def test_a_module_runs_whole_if_what_it_reaches_cannot_be_copied() -> None:
    def program(session: Session) -> Any:
        held = Held(lambda: np.random.Generator(Sealed(1)), lambda held, _: held.random(), lambda held: held.random())
        return trained(held, "cell"), [text for text in session.said if "a Generator that cannot be copied" in text]

    (numbers, held), _ = alone(program)
    for (found, found_held), said in run_ranks(2, program, batches="whole", always_slices=True):
        assert found == pytest.approx(numbers, rel=1e-10, abs=1e-12)
        assert found_held == held
        assert len(said) == 1


def test_what_cannot_be_restored_is_an_error_and_the_rest_is_restored() -> None:
    model = Configured()
    model.first, model.second = bytearray(b"a"), {"a": 1}  # type: ignore[assignment]
    views: list[memoryview] = []

    def change() -> None:
        first, second = cast("bytearray", model.first), cast("dict[str, int]", model.second)
        first.append(98)
        views.append(memoryview(first))  # keeps its size from being changed
        second["a"] = 2
        model.calls += 1

    with pytest.raises(ChangedError, match="a bytearray cannot be restored"), restored_state(model, [model]):
        change()
    assert model.second == {"a": 1}
    assert int(model.calls) == 0
