"""``lagom.extensions.zero.optimizer_probe``: what an optimizer is found to be, and that finding out leaves no trace."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from lagom.extensions.zero.optimizer_probe import ShardingKind, probe_optimizer


class Own(Optimizer):
    """Steps by what ``update`` makes of a parameter, its state and all gradients."""

    def __init__(self, params: Any, update: Callable[..., None]) -> None:
        self.update = update
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], group, every)


def _plain(p: Any, _: Any, group: Any, __: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"])


def _by_norm(p: Any, _: Any, group: Any, __: Any) -> None:
    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def _by_all(p: Any, _: Any, group: Any, every: Any) -> None:
    p.sub_(p.grad / sum(one.grad.norm() for one in every), alpha=group["lr"])


def _by_chance(p: Any, _: Any, group: Any, __: Any) -> None:
    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


def _by_changing(p: Any, _: Any, group: Any, __: Any) -> None:
    p.sub_(p.grad.add_(p, alpha=0.1), alpha=group["lr"])


def _with_a_norm_in_its_state(p: Any, state: Any, group: Any, __: Any) -> None:
    state["norm"] = p.grad.norm()
    p.sub_(p.grad, alpha=group["lr"])


def _with_stacked_state(p: Any, state: Any, group: Any, __: Any) -> None:
    state["moments"] = torch.stack([p.grad, p.grad**2])
    p.sub_(p.grad, alpha=group["lr"])


def _counting_in_its_group(p: Any, _: Any, group: Any, __: Any) -> None:
    group["num"] = group.get("num", 0) + 1
    p.sub_(p.grad, alpha=group["lr"] / group["num"])


def _late(p: Any, state: Any, group: Any, __: Any) -> None:
    state["num"] = state.get("num", 0) + 1
    p.sub_(p.grad if state["num"] < 6 else p.grad / p.grad.norm(), alpha=group["lr"])


def _params() -> list[nn.Parameter]:
    shapes: tuple[tuple[int, ...], ...] = ((300, 20), (20,), (1,), ())
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def found(optimizer: Optimizer, *, closure: bool = False) -> ShardingKind:
    step: Any = type(optimizer).step
    return probe_optimizer(optimizer, step.__wrapped__, closure=closure).kind


@pytest.mark.parametrize(
    "kind",
    [
        *(SGD, Adam, AdamW, Adagrad, NAdam),
        *(pytest.param(one, marks=pytest.mark.soak) for one in (ASGD, Adadelta, Adamax, RAdam, RMSprop, Rprop)),
    ],
)
def test_elementwise_optimizers_of_torch(kind: Any) -> None:
    optimizer = kind(_params(), lr=0.0)
    # Adagrad of older torch cannot make its state anew.
    is_whole = kind is Adagrad and "initial_accumulator_value" not in inspect.getsource(Adagrad._init_group)
    assert found(optimizer) is (ShardingKind.COUPLED if is_whole else ShardingKind.ELEMENTWISE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}), (Adam, {"fused": True}), (AdamW, {"amsgrad": True})],
)
def test_their_settings_count(kind: Any, options: Any) -> None:
    assert found(kind(_params(), lr=0.1, **options)) is ShardingKind.ELEMENTWISE
    assert found(kind(_params(), lr=0.1, **options), closure=True) is ShardingKind.ELEMENTWISE


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brought Muon")
def test_those_that_look_at_whole_matrices() -> None:
    assert found(Adafactor(_params())) is ShardingKind.BY_PARAMETER
    assert found(torch.optim.Muon(_params()[:1])) is ShardingKind.BY_PARAMETER


def test_those_that_cannot_be_stepped_apart() -> None:
    assert found(LBFGS(_params()), closure=True) is ShardingKind.COUPLED
    assert found(SparseAdam(_params())) is ShardingKind.COUPLED
    assert found(Adam(_params(), differentiable=True)) is ShardingKind.COUPLED


@pytest.mark.parametrize(
    ("update", "kind"),
    [
        (_plain, ShardingKind.ELEMENTWISE),
        (_by_norm, ShardingKind.BY_PARAMETER),
        (_late, ShardingKind.BY_PARAMETER),
        (_with_a_norm_in_its_state, ShardingKind.BY_PARAMETER),
        (_with_stacked_state, ShardingKind.BY_PARAMETER),
        (_by_all, ShardingKind.COUPLED),
        (_by_chance, ShardingKind.COUPLED),
        (_by_changing, ShardingKind.ELEMENTWISE),
        (_counting_in_its_group, ShardingKind.COUPLED),
    ],
)
def test_a_third_partys_optimizer(update: Any, kind: ShardingKind) -> None:
    assert found(Own(_params(), update)) is kind


def test_who_changes_gradients_is_known() -> None:
    changing = [Own(_params(), _by_changing), SGD(_params(), 0.1, momentum=0.9, nesterov=True, foreach=True)]
    keeping = [Own(_params(), _plain), SGD(_params(), 0.1, momentum=0.9, nesterov=True, foreach=False)]
    for expected, optimizers in ((True, changing), (False, keeping)):
        for optimizer in optimizers:
            step: Any = type(optimizer).step
            assert probe_optimizer(optimizer, step.__wrapped__, closure=False) == (ShardingKind.ELEMENTWISE, expected)


def test_nothing_is_left_behind() -> None:
    params = _params()
    optimizer = Own(params, _by_chance)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran"))
    before = copy.deepcopy((params, optimizer.param_groups[0]["lr"])), torch.get_rng_state()
    found(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, before[0][0], strict=True))
    assert all(p.grad is None for p in params)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before[1])


class Flagged(Optimizer):
    """Sets ``name`` from True to False by its first step; with ``counts``, the flag changes that step."""

    def __init__(self, params: Any, name: str, counts: bool) -> None:
        self.name, self.counts = name, counts
        setattr(self, name, True)
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first = getattr(self, self.name)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (2 if first and self.counts else 1))
                setattr(self, self.name, False)


def test_a_flag_that_no_step_depends_on_is_ignored() -> None:
    assert found(Flagged(_params(), "_is_unchecked", False)) is ShardingKind.ELEMENTWISE
    assert found(Flagged(_params(), "_is_unchecked", True)) is ShardingKind.COUPLED
    assert found(Flagged(_params(), "unchecked", False)) is ShardingKind.COUPLED  # the program may read it
    fused = SGD(_params(), 0.1, fused=True)
    assert found(fused) is ShardingKind.ELEMENTWISE
    assert found(copy.deepcopy(fused)) is ShardingKind.ELEMENTWISE  # a copy has no flag before its first step


def test_parameters_held_elsewhere_than_in_the_groups() -> None:
    matrices = [nn.Parameter(torch.randn(72, 72, dtype=torch.float64)) for _ in range(2)]
    kinds: list[dict[str, Any]] = [{}, {"line_search_fn": "strong_wolfe"}]
    for options in kinds:
        assert found(LBFGS(matrices, **options), closure=True) is ShardingKind.COUPLED
