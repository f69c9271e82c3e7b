"""Forwards that make leaves of the graph, or keep their input: all numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import alone, check_against_one_process, run_ranks


class Network(nn.Module):
    """A small network whose ``prepare`` makes something of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)
        self.kept: list[Tensor] = []

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(self.prepare(x)).tanh())


class LeafOfView(Network):
    """As the feature encoder of wav2vec2."""

    def prepare(self, x: Tensor) -> Tensor:
        x = x[:, :]
        if self.training:
            x.requires_grad = True
        return x


class LeafOfCopy(Network):
    def prepare(self, x: Tensor) -> Tensor:
        return x.clone().requires_grad_()


class LeafOfItsOwn(Network):
    def prepare(self, x: Tensor) -> Tensor:
        return x + torch.zeros(x.shape, dtype=x.dtype, requires_grad=True)


class LeafInCheckpoint(LeafOfCopy):
    """The leaf is made again in the backward."""

    def forward(self, x: Tensor) -> Any:
        forward = super().forward
        return checkpoint(forward, x, use_reentrant=False)


class LeafBesideWeight(LeafOfView):
    """A weight that is no Parameter is trained beside a leaf of rows, and replaced by a new tensor at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(8, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(self.prepare(x)).tanh() * self.scale)

    def step(self) -> None:
        assert self.scale.grad is not None
        self.scale = (self.scale - 0.1 * self.scale.grad).detach().requires_grad_()


SLICED = (LeafOfView, LeafOfCopy, LeafOfItsOwn, LeafInCheckpoint, LeafBesideWeight)


class KeptLeaf(Network):
    def prepare(self, x: Tensor) -> Tensor:
        x = x[:, :].requires_grad_()
        self.kept = [x]
        return x


class KeptLeafOfItsOwn(Network):
    def prepare(self, x: Tensor) -> Tensor:
        self.kept = [torch.zeros(x.shape, dtype=x.dtype, requires_grad=True)]
        return x + self.kept[0]


class KeptInput(Network):
    def prepare(self, x: Tensor) -> Tensor:
        self.last_input = x
        return x


class KeptView(Network):
    def prepare(self, x: Tensor) -> Tensor:
        self.last_input = x[:, :2]
        return x


class LeafAsOutput(Network):
    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        return super().forward(x), x


class LeafOfInput(Network):
    def prepare(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x.requires_grad_()
        return x


WHOLE = {
    KeptLeaf: "keeps its input",
    KeptLeafOfItsOwn: "keeps a tensor that it makes a leaf",
    KeptInput: "keeps its input",
    KeptView: "keeps its input",
    LeafAsOutput: "gives a tensor that it makes a leaf",
    LeafOfInput: "makes its input a leaf",
}


def train(make: Callable[[], Network]) -> list[Any]:
    """Train; return losses, gradients of leaves that can be read, kept inputs, and weights."""
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator, found = torch.Generator().manual_seed(3), list[Any]()
    x = torch.randn(13, 5, generator=generator, dtype=torch.float64)
    for _ in range(2):
        for batch, wanted in DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8):
            optimizer.zero_grad()
            output = model(batch)
            output, *leaves = output if isinstance(output, tuple) else (output,)
            loss = nn.functional.mse_loss(output, wanted)
            loss.backward()
            optimizer.step()
            if isinstance(model, LeafBesideWeight):
                model.step()
            leaves += [batch, *model.kept]
            found += [loss.detach(), [leaf.grad for leaf in leaves if leaf.is_leaf and leaf.grad is not None]]
            found.append(getattr(model, "last_input", None))
    return [one for one in found if one is not None] + [p.detach() for p in model.parameters()]


def run_all(session: Session, kinds: Any) -> dict[str, Any]:
    """Train each kind; return for each its numbers, and what was said of forwards that run whole."""
    found = {}
    for kind in kinds:
        seed_everything(0)
        session.said.clear()
        numbers = train(kind)
        found[kind.__name__] = numbers, [text for text in session.said if "runs whole" in text]
    return found


@cache
def in_one_process() -> dict[str, Any]:
    found: dict[str, Any] = alone(partial(run_all, kinds=(*SLICED, *WHOLE)))
    return found


@cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    return run_ranks(world_size, partial(run_all, kinds=(*SLICED, *WHOLE)), batches="whole")


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", [*SLICED, *WHOLE])
def test_losses_weights_and_gradients_of_leaves_are_those_of_one_process(kind: type[Network], world_size: int) -> None:
    for found in on_ranks(world_size):
        wanted = in_one_process()[kind.__name__][0]
        torch.testing.assert_close(found[kind.__name__][0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SLICED)
def test_a_forward_that_makes_leaves_for_itself_is_sliced(kind: type[Network]) -> None:
    assert [found[kind.__name__][1] for found in on_ranks(2)] == [[], []]


@pytest.mark.parametrize("kind", WHOLE)
def test_a_forward_whose_leaf_or_input_can_be_read_runs_whole_and_the_log_says_why(kind: type[Network]) -> None:
    for found in on_ranks(2):
        assert any(WHOLE[kind] in text for text in found[kind.__name__][1]), found[kind.__name__][1]


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_shares_of_batches_and_micro_batches(micro_batches: int | None) -> None:
    check_against_one_process(lambda session: train(LeafOfView)[-4:], 2, batches="split", micro_batches=micro_batches)


def test_micro_batches_of_a_sliced_forward() -> None:
    check_against_one_process(lambda session: train(LeafOfView), 2, batches="whole", micro_batches=2)
