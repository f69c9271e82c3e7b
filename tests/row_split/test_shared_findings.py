"""Modules of one structure share what is known of their calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lagom.row_split.module_tree import ModuleTree, call_kind
from lagom.row_split.shared_findings import SharedFindings
from lagom.row_split.split_candidate import SplitFinding
from lagom.row_split.whole_batch import ForwardWork
from lagom.session.session import Session
from tests.ranks import alone, run_ranks

X = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Wrapper(nn.Module):
    """Calls a network; mixes rows if told so."""

    def __init__(self, net: nn.Module, mixes: bool = False, around: Callable[[Any], Any] = torch.tanh) -> None:
        super().__init__()
        self.net, self.mixes, self.around = net, mixes, around

    def forward(self, x: Tensor) -> Any:
        y = self.around(self.net(x))
        return y - y.mean(0) if self.mixes else y


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


def test_a_copy_with_weights_of_its_own_is_split_in_its_first_call() -> None:
    def program(_: Session) -> Any:
        rows: list[int] = []
        first = noting(rows)
        losses = [step(first), step(first)]
        second = copy.deepcopy(first)
        with torch.no_grad():
            second.get_parameter("weight").mul_(2)
        rows.clear()
        return [*losses, step(second)], rows

    expected, _ = alone(program)
    for losses, rows in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        assert rows == [4]


def plus(number: float) -> Callable[[Tensor], Tensor]:
    return lambda y: y + number * y.mean(0)


def renamed(net: nn.Module) -> nn.Module:
    """Return a module of another class with the same name and code, whose helper mixes rows."""

    class Wrapper(HasHelper):
        def helper(self, y: Tensor) -> Tensor:
            return y - y.mean(0)

    return Wrapper(net)


class HasHelper(Wrapper):
    def helper(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Any:
        return self.helper(self.net(x))


def original(net: nn.Module) -> nn.Module:
    kind: type[HasHelper] = type("Wrapper", (HasHelper,), {})
    kind.__qualname__ = "renamed.<locals>.Wrapper"
    return kind(net)


PAIRS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "an attribute": (Wrapper, lambda net: Wrapper(net, mixes=True)),
    "a closure": (lambda net: Wrapper(net, around=plus(0.0)), lambda net: Wrapper(net, around=plus(1.0))),
    "a class of the same name": (original, renamed),
}
"""Makers of a module whose rows are independent, and of one that looks like it and mixes them."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_module_that_only_looks_alike_is_examined(name: str) -> None:
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


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch warns as it unpickles a TreeSpec
def test_another_process_continues_with_the_findings() -> None:
    def known(shared: SharedFindings, trees: ModuleTree) -> tuple[dict[Any, SplitFinding], Any]:
        module = nn.Sequential(nn.Linear(5, 3).double(), nn.ReLU())
        calls = shared.known_calls(module)
        candidate = trees.candidate(module, nn.Module.__call__, (X,), {}, torch.device("cpu"))
        return calls.findings, call_kind(candidate, trees.surroundings(module))

    trees = ModuleTree(print)
    shared = SharedFindings(trees)
    findings, kind = known(shared, trees)
    findings[kind] = SplitFinding(ForwardWork(rows=8), sliced=True)
    state = pickle.loads(pickle.dumps(shared.state()))
    trees = ModuleTree(print)
    shared = SharedFindings(trees)
    shared.set_state(state)
    findings, kind = known(shared, trees)
    assert findings[kind] == SplitFinding(ForwardWork(rows=8), sliced=True)
