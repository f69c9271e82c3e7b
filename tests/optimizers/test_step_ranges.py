"""``lagom.optimizers.step_ranges``: ``step`` and ``zero_grad`` do what torch's do, and a profiler sees them."""

from __future__ import annotations

import functools
import json
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from lagom.session.session import Session
from lagom.watch.spans import OPTIMIZER, unpack_spans
from tests import ranks
from tests.ranks import alone, check_against_one_process, run_ranks
from tests.session.programs import data, mlp


class Own(SGD):
    """A third party's."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


class Rounded(Optimizer):
    """An optimizer that has nothing of torch's steps."""

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


def test_steps_and_hooks_are_those_of_one_process() -> None:
    seen, wanted = alone(program)
    assert seen[-1] == [True, True]
    for rank_seen, found in run_ranks(2, program):
        assert rank_seen == seen
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def fused(_: Session | None = None) -> list[torch.Tensor]:
    """Weights after steps of torch's fused implementations."""
    torch.manual_seed(0)
    model = mlp()
    kinds: list[Any] = [torch.optim.AdamW, Adam, SGD, torch.optim.Adagrad]
    for optimizer in [kind(model.parameters(), 0.01, fused=True) for kind in kinds]:
        for x, y in DataLoader(data(22), batch_size=6):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("zero_lvl", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_fused_optimizers_make_of_ranks_what_they_make_of_one_process(zero_lvl: int) -> None:
    check_against_one_process(fused, atol=1e-9, zero_lvl=zero_lvl)


def ranges(_: Session | None = None) -> list[str]:
    """Return the ranges that a profiler records: a reused one, which also runs before and after it, and a decorator."""
    opened = torch.autograd.profiler.record_function("reused")

    @torch.autograd.profiler.record_function("decorated")
    def decorated() -> None:
        pass

    def run() -> None:
        decorated()
        for _ in range(2):
            with opened:
                pass

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.profiler.record_function("compiled"):
            return x + 1

    assert compiled(torch.ones(2)).tolist() == [2, 2]
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as looked:
        run()
    run()
    return [event.name for event in looked.events() or [] if event.name in ("reused", "decorated")]


def test_a_profiler_sees_the_ranges_of_a_program_as_in_one_process() -> None:
    assert run_ranks(2, ranges) == [alone(ranges)] * 2 == [["decorated", "reused", "reused"]] * 2


def graphs(_: Session | None = None) -> list[Any]:
    """Return what TorchScript, its tracer and ``make_fx`` see of a range."""

    def ranged(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.profiler.record_function("ranged"):
            return x * 2

    x = torch.ones(2)
    found: list[Any] = [torch.autograd.profiler.record_function is torch.profiler.record_function]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated
        compiled = torch.jit.script(ranged), torch.jit.trace(ranged, x)
    for one in compiled:
        found += [one(x).tolist(), "ranged" in str(one.inlined_graph)]
    return [*found, [str(node.target) for node in make_fx(ranged)(x).graph.nodes]]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch does not support torch.jit.script there")
def test_a_range_is_in_scripted_and_traced_functions_as_in_one_process() -> None:
    wanted = alone(graphs)
    assert wanted[:5] == [True, [2.0, 2.0], True, [2.0, 2.0], True]
    assert run_ranks(2, graphs) == [wanted] * 2


def with_a_timeline(session: Session) -> tuple[list[str], list[str]]:
    """Steps without hooks and with one of the program's own, and one that is not noted."""
    assert session.spans is not None
    model = mlp()
    seen: list[str] = []

    def step(optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        x, y = data(6).tensors
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    optimizers = [SGD(model.parameters(), 0.1), Adam(model.parameters(), 0.1), Rounded(model.parameters())]
    for optimizer in optimizers:
        step(optimizer)
    everywhere = register_optimizer_step_post_hook(lambda one, *_: seen.append(type(one).__name__))
    for optimizer in optimizers:
        step(optimizer)
    everywhere.remove()
    session.spans.keeps = False
    step(optimizers[0])
    recorded = [span for block in session.spans.blocks() for span in json.loads(unpack_spans(block.data))["spans"]]
    return [span[1] for span in recorded if span[0] == OPTIMIZER], seen


def test_a_timeline_has_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMELINE", True)
    each = ["SGD.step", "Adam.step", "Rounded.step"]
    for steps, seen in run_ranks(2, with_a_timeline):
        assert steps == [*each, *each]
        assert seen == ["SGD", "Adam", "Rounded"]
