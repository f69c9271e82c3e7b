"""``lagom.patching.stepping``: ``step`` and ``zero_grad`` do what torch's do, and are torch's again afterwards."""

from __future__ import annotations

import functools
import sys
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lagom.patching.session import Session
from tests.patching.programs import data, mlp
from tests.ranks import alone, run_ranks


class Own(SGD):
    """A third party's."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


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
