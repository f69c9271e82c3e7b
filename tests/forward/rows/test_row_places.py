"""Forwards whose input or output has the rows of the batch in another dimension than the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import alone, run_ranks

WIDTH = 3
Loss = Callable[[Any, Tensor], Tensor]


def trained(session: Session, model: nn.Module, loss_of: Loss, batch: int = 8, steps: int = 5) -> Any:
    """Train on samples of some steps each, with a tail of another size; return losses, weights, and what ran whole."""
    torch.manual_seed(3)
    model.double()
    samples = TensorDataset(torch.randn(2 * batch + batch - 1, steps, WIDTH, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        for (x,) in DataLoader(samples, batch_size=batch):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = [one.detach().clone() for one in model.state_dict().values()]
    return losses, weights, sorted(text for text in session.said if "runs whole on every rank" in text)


def check(program: Callable[[Session], Any], world_size: int, whole: str = "") -> None:
    """Check that ``program`` gives one process's numbers, and that all was split, or that ``whole`` says why not."""
    *wanted, _ = alone(program)
    found = run_ranks(world_size, program, batches="whole")
    for *numbers, said in found:
        torch.testing.assert_close(numbers, wanted, rtol=0, atol=1e-12)
        assert bool(said) == bool(whole), said
        assert all(whole in text for text in said)


class Turned(nn.Module):
    """Takes and returns steps in the first dimension, with a state beside them."""

    def __init__(self, kind: Callable[..., nn.RNNBase], dropout: float = 0.0) -> None:
        super().__init__()
        self.rnn, self.head = kind(WIDTH, 4, 2, dropout=dropout), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        x, state = self.rnn(x, state)
        return self.head(x), state


def turned_loss(model: nn.Module, x: Tensor) -> Tensor:
    found, state = model(x.transpose(0, 1).contiguous())
    _, other = model(x.transpose(0, 1), state)
    total: Tensor = (found[-1] - x[:, 0, :2]).square().mean() + sum(one.abs().mean() for one in other)
    return total


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("batch", [8, 5])  # 5 as there are steps: both dimensions of the input have the same size
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_steps_may_be_in_the_first_dimension(kind: Callable[..., nn.RNNBase], batch: int, world_size: int) -> None:
    def program(session: Session) -> Any:
        return trained(session, Turned(kind), turned_loss, batch)

    # A tail has fewer than two rows for each of 3 ranks, or others than at first.
    *wanted, _ = alone(program)
    for *numbers, said in run_ranks(world_size, program, batches="whole"):
        torch.testing.assert_close(numbers, wanted, rtol=0, atol=1e-12)
        assert bool(said) == (batch < 2 * world_size), "it runs whole if not every rank has two rows"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_rows_may_come_once_for_each_step(world_size: int) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn, self.head = nn.Embedding(7, 4), nn.LSTM(4, 4), nn.Linear(4, 7)

        def forward(self, ids: Tensor) -> Any:
            return F.log_softmax(self.head(self.rnn(self.table(ids))[0]).flatten(0, 1), 1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        ids = (x[:, :, 0].T * 100).long() % 7
        return F.nll_loss(model(ids), ids.flatten())

    check(lambda session: trained(session, Words(), loss), world_size)


def test_dropout_over_steps_draws_as_one_process_does() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.drop, self.other = nn.Linear(WIDTH, 4), nn.Dropout(0.4), nn.Linear(4, 2)
            self.rnn = nn.GRU(4, 4)

        def forward(self, x: Tensor) -> Any:
            x, _ = self.rnn(self.drop(self.one(x)))
            return self.other(self.drop(x))

    check(lambda s: trained(s, Dropping(), lambda model, x: model(x.transpose(0, 1)).square().mean()), 2)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_only_the_output_may_have_steps_first(world_size: int) -> None:
    class Spikes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            level, spikes, levels = torch.zeros(()), [], []
            for step in range(x.shape[1]):
                level = 0.9 * level + self.inner(x[:, step])
                spikes.append((level > 0.1).double() + level - level.detach())
                levels.append(self.head(spikes[-1]))
            return torch.stack(spikes), torch.stack(levels, 2), levels[-1]

    def loss(model: nn.Module, x: Tensor) -> Any:
        spikes, levels, last = model(x)
        assert spikes.is_contiguous()
        assert spikes.shape[:2] == (x.shape[1], x.shape[0])
        spikes[0] += 1  # as of any output
        return spikes.mean() + levels.square().mean() + last.square().sum()

    check(lambda session: trained(session, Spikes(), loss), world_size)


def test_a_second_gradient_passes_a_turned_forward() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        x = x.transpose(0, 1).clone().requires_grad_()
        found, _ = model(x)
        (slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        return slope.square().mean() + found.mean()

    check(lambda session: trained(session, Turned(nn.GRU), loss), 2)


class Mixing(Turned):
    """Mixes the rows of the second dimension in some way."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.GRU)
        self.gate = nn.Parameter(torch.zeros(()))
        self.mix = mix

    def forward(self, x: Tensor, state: Any = None) -> Any:
        found, state = super().forward(x, state)
        return found + self.mix(found) + self.gate * self.mix(x).mean(), state


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x.mean((0, 1)),
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.roll(1, 1),
        lambda x: 0 * x + (x.abs().amax() > 1e-3) * 0.1,
        lambda x: 0 * x + 0.1 * x.shape[1],
    ],
)
def test_a_forward_that_mixes_rows_of_the_second_dimension_runs_whole(mix: Callable[[Tensor], Tensor]) -> None:
    check(lambda session: trained(session, Mixing(mix), turned_loss), 2, "Mixing runs whole")


def test_a_closed_gate_hides_no_mixing_in_the_second_dimension() -> None:
    class Closed(Turned):
        def __init__(self) -> None:
            super().__init__(nn.GRU)
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor, state: Any = None) -> Any:
            found, state = super().forward(x, state)
            return found + self.gate * x.mean(1, keepdim=True)[..., :2], state

    check(lambda session: trained(session, Closed(), turned_loss), 2, "Closed runs whole")


def test_mixing_that_begins_later_is_noticed_in_the_second_dimension() -> None:
    class Later(Turned):
        def __init__(self) -> None:
            super().__init__(nn.GRU)

        def forward(self, x: Tensor, state: Any = None) -> Any:
            found, state = super().forward(x, state)
            return (found - found.mean(1, keepdim=True) if when[0] > 1 else found), state

    when = [1]  # lagom distinguishes calls by the sign of a number

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        when[0] = 1 + (len(seen) > 2)
        seen.append(0)
        return turned_loss(model, x)

    seen: list[int] = []

    def program(session: Session) -> Any:
        seen.clear()
        when[0] = 1
        return trained(session, Later(), loss)

    check(program, 2, "Later runs whole")


class Centring(nn.Module):
    """Subtracts the mean over the batch from some call on, which mixes its rows, but not the second dimension's."""

    now: ClassVar[list[int]] = [0]

    def __init__(self, first: int) -> None:
        super().__init__()
        self.one, self.other, self.first = nn.Linear(WIDTH, 4), nn.Linear(4, 2), first

    def forward(self, x: Tensor) -> Any:
        x = self.one(x)
        return self.other(x - x.mean(0) if self.now[0] >= self.first else x)


@pytest.mark.parametrize("first", [0, 4])
def test_rows_of_the_batch_may_be_mixed_if_those_of_the_second_dimension_are_not(first: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        Centring.now[0] += 1
        return model(x).square().mean()

    def program(session: Session) -> Any:
        Centring.now[0] = 0
        return trained(session, Centring(first), loss)

    check(program, 2, "Centring runs whole" if first else "")


def test_other_sizes_may_turn_another_argument() -> None:
    """A weight of 7 places among the arguments is as long as the tail of 7 rows, and then must not be cut."""

    class Weighted(Turned):
        def forward(self, x: Tensor, places: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x)[0] + places.mean()

    def loss(model: nn.Module, x: Tensor) -> Any:
        return model(x.transpose(0, 1), torch.arange(14.0, dtype=torch.float64).view(2, 7)).square().mean()

    check(lambda session: trained(session, Weighted(nn.GRU), loss), 2)


def test_one_hot_is_no_decision_by_the_classes() -> None:
    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(20, 2)

        def forward(self, ids: Tensor) -> Any:
            return self.head(F.one_hot(ids, 20).double())

    def loss(model: nn.Module, x: Tensor) -> Any:
        return model((x[:, :, 0] * 100).long() % 20).square().mean()

    check(lambda session: trained(session, Coded(), loss), 2)


def test_one_hot_of_a_class_that_is_too_large_fails_as_in_torch() -> None:
    class Coded(nn.Linear):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(F.one_hot(ids, 20).double())

    def program(_: Session) -> str:
        model = Coded(20, 1).double()
        for number in (0, 1, 2, 25):
            with torch.no_grad():
                try:
                    model(torch.tensor([number, 3, 4, number]))
                except RuntimeError as error:
                    return str(error)
        return ""

    assert run_ranks(2, program, batches="whole") == [alone(program)] * 2
