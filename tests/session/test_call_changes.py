"""``lagom.session.call_changes``: objects that a function changes on the ranks are named, and no others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from enum import Flag
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.program.signature import Call
from lagom.session.call_changes import CallChanges

log: list[int] = []
best = 0.0


class Trainer:
    """Keeps what it has trained in itself, as many programs do."""

    runs = 0

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.model = nn.Linear(4, 1)
        self.judge = nn.Linear(4, 1)
        self.data = TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
        self.rate = 0.1

    def fit(self, hparams: dict[str, Any]) -> float:
        global best
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)
        self.judge.eval()
        for x, y in DataLoader(self.data, batch_size=4):
            optimizer.zero_grad()
            loss = (self.model(x) - self.judge(y.expand(4, 4))).square().mean()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())
        hparams["trained"] = True
        log.append(1)
        Trainer.runs += 1
        best = self.best = min(self.losses)
        return self.losses[-1] + 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_objects_that_the_ranks_have_changed_are_named(world_size: int, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer()
    weight, hparams = trainer.model.weight.detach().clone(), {"lr": 0.1}
    config = TorchDistributedConfig(launcher="local", world_size=world_size, hparams=hparams, run_dir=None)
    experiment.lagom(trainer.fit, config)
    said = [line for line in capfd.readouterr().err.splitlines() if "changed" in line]
    names = "self.losses, self.model, self.best, hparams, Trainer.runs, best and 1 more"
    assert said == [f"lagom: fit: changed {names} on the ranks; yours are as before: return them"]
    assert trainer.losses == log == []
    assert trainer.model.weight.equal(weight)
    assert hparams == {"lr": 0.1}


@pytest.mark.needs("zero")
def test_sharded_parameters_are_not_read(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 looks alone, while each rank has a part of each parameter."""
    model, frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)

    def train() -> nn.Module:
        optimizer = torch.optim.SGD([*model.parameters(), *frozen.parameters()], lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(8, 64)), batch_size=4):
            optimizer.zero_grad()
            frozen(model(x)).square().mean().backward()
            optimizer.step()
        return frozen

    experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2, zero_lvl=3, run_dir=None))
    assert "changed model on the ranks; yours is as before: return it\n" in capfd.readouterr().err


def test_inline_the_objects_are_the_callers_and_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    losses: list[float] = []

    def train() -> None:
        losses.append(1.0)

    experiment.lagom(train, TorchDistributedConfig(launcher="inline", run_dir=None))
    assert losses == [1.0]
    assert "changed" not in capfd.readouterr().err


def changed(function: Callable[..., Any], **hparams: Any) -> list[str]:
    """Call ``function``, and return the names of what it has changed."""
    changes = CallChanges(Call(function=function, provided={"hparams": hparams}))
    return changes.names(function(**hparams))


class Plain:
    """An object of the program's."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    @functools.cached_property
    def size(self) -> int:
        return 1


class Slots:
    """An object without a dict."""

    __slots__ = ("count", "never")

    def __init__(self) -> None:
        self.count = 0


def put(held: Any, key: Any, value: Any) -> None:
    held[key] = value


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([], lambda one: one.append(1)),
        ([torch.zeros(3)], lambda one: one[0].add_(1)),
        ({"a": 1}, lambda one: one.update(a=2)),
        ({"a": {"b": {1}}}, lambda one: one["a"]["b"].add(2)),
        (np.zeros(3), lambda one: put(one, 1, 1.0)),
        (np.zeros((1100, 1000)).T, lambda one: put(one, slice(None), 1.0)),
        (torch.zeros(3, dtype=torch.bfloat16), lambda one: put(one.data, 0, 1.0)),
        (TensorDataset(torch.zeros(4)), lambda one: one.tensors[0].add_(1)),
        (nn.BatchNorm1d(2), lambda one: one(torch.ones(2, 2))),
        (nn.Sequential(nn.Linear(2, 2)), lambda one: one.append(nn.Linear(2, 2))),
        (nn.LazyLinear(2), lambda one: one(torch.ones(2, 2))),
        (Slots(), lambda one: setattr(one, "count", 1)),
    ],
    ids=lambda one: type(one).__name__ if not callable(one) or isinstance(one, nn.Module) else "",
)
def test_a_change_at_any_depth_is_a_change(value: Any, change: Callable[[Any], Any]) -> None:
    def train(held: Any) -> None:
        change(held)

    assert changed(train, held=value) == ["held"]


class Counted(Dataset[int]):
    """Caches and counts, as data sets do."""

    def __init__(self) -> None:
        self.cache: dict[int, int] = {}

    def __getitem__(self, index: int) -> int:
        return self.cache.setdefault(index, index)

    def __len__(self) -> int:
        return 4


class Mode(Flag):
    A, B = 1, 2


@functools.lru_cache
def cached(number: int) -> int:
    return number


def test_what_changes_by_nature_is_no_change() -> None:
    model, generator = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.Generator()
    loader, lock = DataLoader(Counted(), shuffle=True, generator=generator), threading.Lock()
    optimizer, plain = torch.optim.SGD(model.parameters(), 0.1), Plain(("ab", float("nan")))

    def train(data: Any) -> Any:
        model.train(not model.training)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.zero_grad()
        plain.value = ("abc"[:2], float("nan"))
        with lock:
            return sum(len(batch) for batch in loader) + cached(3) + plain.size + data[1] + (Mode.A | Mode.B).value

    assert changed(train, data=Counted()) == []


def test_what_is_returned_is_not_lost() -> None:
    model, losses, box = nn.Linear(2, 2), [0.0], Plain(0.0)

    def train(copies: bool) -> Any:
        losses.append(1.0)
        box.value = 2.0
        with torch.no_grad():
            model.weight.add_(1)
        state = {name: one.clone() for name, one in model.state_dict().items()}
        return [state, {"losses": list(losses)}, box.value] if copies else (model, losses, box)

    assert changed(train, copies=True) == changed(train, copies=False) == []


class Hostile:
    """Fails whatever is done with it."""

    def fail(self, *_: Any) -> Any:
        raise RuntimeError("looked at")

    __eq__ = __hash__ = __len__ = __iter__ = __repr__ = __bool__ = __getattr__ = fail


class HostileList(list[int]):
    __eq__ = __iter__ = __len__ = Hostile.fail


class HostileModule(nn.Module):
    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("looked at")


def test_objects_that_cannot_be_looked_at_do_not_end_the_run_or_hide_others() -> None:
    ring: list[Any] = []
    ring.append(ring)
    array = np.empty(1, dtype=object)
    array[0] = Hostile()
    held = [Hostile(), HostileList([1]), HostileModule(), array, ring, Plain(Hostile())]
    losses: list[Any] = []

    def train(hostile: Any, other: Any) -> Any:
        losses.append(held[0])
        return held[-2:]

    assert changed(train, hostile=held[0], other=held[2]) == ["losses"]


def test_of_partials_modules_and_functions_names_are_those_of_the_source() -> None:
    def count() -> None:
        count.calls += 1  # type: ignore[attr-defined]

    count.calls = 0  # type: ignore[attr-defined]

    def train(first: list[int], second: dict[str, int]) -> None:
        first.append(1)
        second["a"] = 1
        count()

    assert changed(functools.partial(train, [], second={})) == ["first", "second", "count.calls"]
