"""Wrappers that a program makes anew around one network are examined once; modules that only look alike are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lagom.session.session import Session
from tests.ranks import alone, run_ranks

X = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Wrapper(nn.Module):
    """Has nothing of its own but the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.net(x))


def noting(rows: list[int]) -> nn.Module:
    note = rows.append

    class Noting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            note(len(input))
            return super().forward(input)

    torch.manual_seed(1)
    return Noting(5, 3).double()


def step(model: nn.Module) -> Any:
    loss = model(X).square().sum()
    loss.backward()
    return loss.item()


def test_a_wrapper_made_anew_in_each_step_is_examined_once() -> None:
    def program(_: Session) -> Any:
        rows: list[int] = []
        net = noting(rows)
        losses = []
        for _step in range(3):
            wrapper = Wrapper(net)
            losses += [step(wrapper), step(wrapper)]
        return losses, rows[-4:]

    expected, _ = alone(program)
    for losses, rows in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        assert rows == [4, 4, 4, 4]


def of_dim(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda h: torch.softmax(h, dim)


class Holding(Wrapper):
    """Mixes the rows of a batch, or not, by what it holds."""

    def __init__(self, net: nn.Module, held: Any) -> None:
        super().__init__(net)
        self.held = held

    def forward(self, x: Tensor) -> Any:
        h = self.net(x)
        for part in self.held if isinstance(self.held, (list, tuple)) else [self.held]:
            h = part(h) if callable(part) else h - h.mean(part, keepdim=True)
        return h


class Filling(Wrapper):
    """Fills a cache from its first batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.stats: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        if not self.stats:
            self.stats["mean"] = x.mean(0)
        return self.net(x - self.stats["mean"])


class Slotted(Wrapper):
    __slots__ = ("dim",)

    def __init__(self, net: nn.Module, dim: int) -> None:
        super().__init__(net)
        object.__setattr__(self, "dim", dim)

    def forward(self, x: Tensor) -> Any:
        return self.net(x).softmax(self.dim)


PAIRS: dict[str, list[Callable[[nn.Module], nn.Module]]] = {
    "a closure": [lambda net: Holding(net, of_dim(1)), lambda net: Holding(net, of_dim(0))],
    "functions of one line": [partial(Holding, held=f) for f in (lambda h: h.softmax(1), lambda h: h.softmax(0))],
    "a tuple": [lambda net: Holding(net, (1,)), lambda net: Holding(net, (0,))],
    "a list of functions": [lambda net: Holding(net, [of_dim(1)]), lambda net: Holding(net, [of_dim(0)])],
    "slots": [lambda net: Slotted(net, 1), lambda net: Slotted(net, 0)],
    "a cache": [Filling, Filling],
    "copies": [copy.deepcopy, lambda net: Holding(copy.deepcopy(net), 0)],
}
"""Makers of modules that look alike; the second of a pair mixes the rows of its batch."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_module_with_something_of_its_own_is_examined(name: str) -> None:
    def program(_: Session) -> Any:
        net, losses = noting([]), []
        for _step in range(3):
            for make in PAIRS[name]:
                module = make(net)
                losses += [step(module), step(module)]
        return losses

    expected = alone(program)
    for losses in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


def test_a_wrapper_around_another_network_or_of_another_class_is_examined() -> None:
    class Mixing(Wrapper):
        def forward(self, x: Tensor) -> Any:
            h = super().forward(x)
            return h - h.mean(0)

    def program(_: Session) -> Any:
        net, losses = noting([]), []
        for number in range(3):
            other = nn.Sequential(noting([]), Centre() if number == 1 else nn.Identity())
            for module in (Wrapper(net), Mixing(net), Wrapper(other)):
                losses += [step(module), step(module)]
        return losses

    expected = alone(program)
    for losses in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)
