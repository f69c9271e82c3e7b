"""``lr_scaling="linear"``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from lagom.errors import LagomError
from lagom.session.session import Session
from tests.ranks import lagom_log, run_ranks


class Around(Optimizer):
    """An optimizer that steps by another one, and has its groups."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


@pytest.mark.parametrize(
    ("world_size", "zero_lvl"), [*(pytest.param(*other, marks=pytest.mark.soak) for other in ((1, 0), (3, 0))), (2, 2)]
)
def test_rates_are_times_the_number_of_ranks_wherever_they_are_given(world_size: int, zero_lvl: int) -> None:
    def run(session: Session) -> Any:
        session.is_unpacked = True
        one, two, three, four = (nn.Parameter(torch.ones(2)) for _ in range(4))
        groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [two], "lr": 0.5}]
        optimizer = SGD(groups, lr=0.1)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
        optimizer.add_param_group({"params": [three], "lr": torch.tensor(2.0)})
        found = [float(group["lr"]) for group in optimizer.param_groups]
        inside = copy.deepcopy(optimizer).param_groups[0]["lr"], Around(optimizer).param_groups[0]["lr"]
        one.sum().backward()
        optimizer.step()
        moved = 1 - one[0].item()
        scheduler.step()
        by_default = Adam([four]).param_groups[0]["lr"]
        return found, inside, moved, optimizer.param_groups[0]["lr"], by_default

    for found, inside, moved, later, by_default in run_ranks(world_size, run, lr_scaling="linear", zero_lvl=zero_lvl):
        assert found == pytest.approx([0.1 * world_size, 0.5 * world_size, 2.0 * world_size])
        assert inside == pytest.approx((0.1 * world_size, 0.1 * world_size))
        assert moved == pytest.approx(0.1 * world_size, rel=1e-6)
        assert later == pytest.approx(0.01 * world_size)
        assert by_default == pytest.approx(1e-3 * world_size)


def test_it_is_said_and_off_otherwise() -> None:
    def run(session: Session) -> Any:
        said = lagom_log()
        return SGD([nn.Parameter(torch.ones(1))], lr=0.25).param_groups[0]["lr"], said

    ((rate, said), _) = run_ranks(2, run, lr_scaling="linear", batches="per_rank")
    assert rate == 0.5
    assert said == ["lr_scaling='linear': SGD has the learning rate 0.5 in place of 0.25, for 2 ranks"]
    ((_, said), _) = run_ranks(2, run, lr_scaling="linear")
    assert "with batches='split' a batch is no larger than on one machine" in said[0]
    assert run_ranks(2, run) == [(0.25, [])] * 2


def test_a_program_that_is_distributed_by_itself_is_told_that_it_has_none_of_this() -> None:
    def run(session: Session) -> Any:
        said = lagom_log()
        torch.distributed.init_process_group("gloo")
        rate = SGD([nn.Parameter(torch.ones(1))], lr=0.25).param_groups[0]["lr"]
        torch.distributed.destroy_process_group()
        return rate, [text for text in said if "distributed by itself" in text]

    for rate, said in run_ranks(2, run, lr_scaling="linear", gradient_compression="bf16"):
        assert rate == 0.25
        assert len(said) == 1


def test_an_optimizer_that_arrives_with_the_program_is_refused() -> None:
    sent = pickle.dumps(SGD([nn.Parameter(torch.ones(1))], lr=0.25))

    def run(session: Session) -> str:
        with pytest.raises(LagomError, match="SGD was made before") as caught:
            pickle.loads(sent)
        return str(caught.value)

    run_ranks(2, run, lr_scaling="linear")
