"""``lagom.run_state.loss_terms``: a loss of several batches is weighted term by term."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import check_against_one_process, run_ranks

Step = Callable[[nn.Module, Any, Any], Tensor]
mse, l1 = nn.functional.mse_loss, nn.functional.l1_loss


def data(count: int) -> TensorDataset:
    x = torch.randn(count, 2, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x[:, :1]))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def weights(model: nn.Module) -> list[Tensor]:
    return [part.detach() for part in model.state_dict().values()]


def pairs() -> Iterator[tuple[Any, Any]]:
    """Zip two loaders with differently uneven tails; the second one is longer."""
    one = DataLoader(data(13), batch_size=5, shuffle=True)
    other = DataLoader(data(18), batch_size=6, shuffle=True)
    return zip(one, other, strict=False)


def added(model: nn.Module, a: Any, b: Any) -> Tensor:
    decay = sum(p.square().sum() for p in model.parameters())
    return mse(model(a[0]), a[1]) - 0.3 * l1(model(b[0]), b[1]) / 2 + 0.01 * decay


def all_forwards_first(model: nn.Module, a: Any, b: Any) -> Tensor:
    for_a, for_b = model(a[0]), model(b[0])
    return torch.stack([mse(for_a, a[1]), l1(for_b, b[1])]).mean() * 3


def shared(model: nn.Module, a: Any, b: Any) -> Tensor:
    """Use one term twice, once within a product."""
    first = mse(model(a[0]), a[1])
    return first * 2 + (first * 0.5 + l1(model(b[0]), b[1])) * 0.7


def in_views(model: nn.Module, a: Any, b: Any) -> Tensor:
    return mse(model(a[0].view(-1, 2)), a[1]) + l1(model(b[0][:]), b[1])


def in_a_chain(model: nn.Module, a: Any, b: Any) -> Tensor:
    """Call models with the outputs of models."""
    assert isinstance(model, nn.Sequential)
    hidden_a, hidden_b = model[:2](a[0]), model[:2](b[0])
    out_a, out_b = model[2:](hidden_a), model[2:](hidden_b)
    return mse(out_a, a[1]) + l1(out_b, b[1])


STEPS: list[Step] = [added, all_forwards_first, shared, in_views, in_a_chain]


def trained(step: Step) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        for a, b in pairs():
            optimizer.zero_grad()
            step(model, a, b).backward()
            optimizer.step()
    return weights(model)


def summed_over_an_epoch(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _epoch in range(3):
        optimizer.zero_grad()
        total = torch.zeros(1, dtype=torch.float64)
        for x, y in DataLoader(data(11), batch_size=4):
            total += mse(model(x), y)
        (total / 3).sum().backward()
        optimizer.step()
    return weights(model)


def backwards_in_another_order(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for a, b in pairs():
        optimizer.zero_grad()
        first, second = mse(model(a[0]), a[1]), l1(model(b[0]), b[1])
        first.backward(retain_graph=True)
        torch.autograd.backward([second, first * 2])
        optimizer.step()
    return weights(model)


def fetched_before_the_backward(_: Session) -> list[Tensor]:
    """Fetch the next batch between a forward and its backward; only the tail has uneven shares."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _epoch in range(2):
        batches = iter(DataLoader(data(17), batch_size=6, shuffle=True))
        following: Any = next(batches)
        while following is not None:
            x, y = following
            loss = mse(model(x), y)
            following = next(batches, None)
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), found, strict=True):
                    p.sub_(gradient, alpha=0.1)
    return weights(model)


PROGRAMS: dict[str, Callable[[Session], list[Tensor]]] = {
    **{step.__name__: lambda _, step=step: trained(step) for step in STEPS},  # type: ignore[misc]
    "summed_over_an_epoch": summed_over_an_epoch,
    "backwards_in_another_order": backwards_in_another_order,
    "fetched_before_the_backward": fetched_before_the_backward,
}


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3))])
def test_the_weights_are_those_of_one_machine(world_size: int) -> None:
    def run(session: Session) -> dict[str, list[Tensor]]:
        found = {}
        for name, program in PROGRAMS.items():
            seed_everything(0)
            found[name] = program(session)
        return found

    check_against_one_process(run, world_size, atol=0 if world_size == 1 else 1e-12)


def test_batches_that_a_loss_couples_are_told_once_and_nothing_stays_on_the_graph() -> None:
    def run(session: Session) -> Any:
        model = mlp()
        told = []
        for (x, _), (y, _) in pairs():
            loss = (model(x).mean() * model(y).mean()) + mse(model(x), model(x).detach())
            loss.backward(retain_graph=True)
            told.append(any("couples batches" in text for text in session.said))
            assert loss.grad_fn is not None
            model.zero_grad()
            loss.backward()
        del loss
        return told, len(session.backwards.loss_weights._uneven)

    for told, num_left in run_ranks(2, run):
        assert told == [True, True, True]  # 5 and 6 samples on 2 ranks
        assert num_left == 0


def test_even_shares_are_never_looked_at() -> None:
    def run(session: Session) -> Any:
        model = mlp()
        for x, y in DataLoader(data(8), batch_size=4):
            loss = mse(model(x), y)
            assert len(session.backwards.loss_weights._uneven) == 0
            loss.backward()
        return True

    assert run_ranks(2, run) == [True] * 2
