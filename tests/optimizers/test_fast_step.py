"""``lagom.optimizers.fast_step``: ``step`` and ``zero_grad`` do what torch's do, and are torch's again afterwards."""

from __future__ import annotations

import functools
import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lagom.monitor.spans import OPTIMIZER
from lagom.patching.replace import replaced
from lagom.session.session import Session
from tests import ranks
from tests.ranks import alone, run_ranks
from tests.session.programs import data, mlp


class Own(SGD):
    """A third party's."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


class Rounded(Optimizer):
    """One that has nothing of torch's steps, and knows of no short way."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign() * 0.01)


def doubled(step: Any) -> Any:
    """A decorator that copies what is on the function, as torch's own wrapper does."""

    @functools.wraps(step)
    def twice(*args: Any, **kwargs: Any) -> Any:
        step(*args, **kwargs)
        return step(*args, **kwargs)

    return twice


def program(_: Session | None = None) -> list[Any]:
    """Steps of several classes, with hooks and without, with a closure, a schedule and all ways to zero."""
    torch.manual_seed(0)
    SGD([torch.zeros(1)])  # from here on its class has torch's wrapper, if it had not before
    model = mlp()
    seen: list[Any] = []

    def backward() -> Tensor:
        x, y = data(6).tensors
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    class Twice(SGD):
        step = doubled(SGD.step)

    for kind in (SGD, Own, Twice):
        optimizer = kind(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for i in range(6):
            optimizer.zero_grad(set_to_none=i != 2)
            seen.append([p.grad is None for p in model.parameters()])
            backward()
            if i == 3:
                optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
            everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("after")) if i == 4 else None
            loss = optimizer.step(backward if i == 1 else None)
            seen.append(loss is None)
            if everywhere is not None:
                everywhere.remove()
            if i > 1:
                schedule.step()
        seen.append(getattr(optimizer, "steps", 0))
    with torch.profiler.profile() as looked:
        optimizer.zero_grad()
        optimizer.step()
    names = {event.name for event in looked.events() or []}
    seen.append([f"Optimizer.{name}#Twice.{name}" in names for name in ("step", "zero_grad")])
    return [seen, [p.detach().clone() for p in model.parameters()]]


def on_a_rank(session: Session) -> list[Any]:
    found = program(session)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cloudpickle.dumps(Own)  # which a run's own functions would not allow
    return [*found, [_is_torchs(name) for name in ("step", "zero_grad")]]


def _is_torchs(name: str) -> bool:
    function: Any = getattr(SGD, name)
    return str(function.__code__.co_filename).startswith(torch.__path__[0])


def test_steps_and_hooks_are_those_of_one_process() -> None:
    seen, wanted = alone(program)
    assert seen[-1] == [True, True]
    for rank_seen, found, are_torchs in run_ranks(2, on_a_rank):
        assert rank_seen == seen
        assert are_torchs == [False, False]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert _is_torchs("step")
    assert _is_torchs("zero_grad")
    assert vars(Optimizer)["_patch_step_function"].__qualname__ == "Optimizer._patch_step_function"


def with_a_timeline(session: Session) -> tuple[list[str], list[str], list[str]]:
    """Steps by the short way, with hooks of the program's own, and of a class of its own."""
    assert session.spans is not None
    model = mlp()
    entries: list[str] = []
    seen: list[str] = []

    class Noted(record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            entries.append(name)
            super().__init__(name, args)

    def step(optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        x, y = data(6).tensors
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    optimizers = [SGD(model.parameters(), 0.1), Adam(model.parameters(), 0.1), Rounded(model.parameters())]
    for optimizer in optimizers:
        step(optimizer)  # the first makes its profiler's name
    with replaced(torch.autograd.profiler, "record_function", Noted):
        for optimizer in optimizers[:2]:
            step(optimizer)
        everywhere = register_optimizer_step_post_hook(lambda one, *_: seen.append(type(one).__name__))
        for optimizer in optimizers:
            step(optimizer)
        everywhere.remove()
    session.spans.keeps = False
    step(optimizers[0])
    steps = [span[1] for span in session.spans._spans if span[0] == OPTIMIZER]
    return steps, seen, entries


def test_a_timeline_has_each_step_once_and_sends_none_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMELINE", True)
    each = ["SGD.step", "Adam.step", "Rounded.step"]
    for steps, seen, entries in run_ranks(2, with_a_timeline):
        assert steps == [*each, *each[:2], *each]
        assert seen == ["SGD", "Adam", "Rounded"]
        assert [name for name in entries if ".step#" in name] == [f"Optimizer.step#{kind}.step" for kind in seen]
