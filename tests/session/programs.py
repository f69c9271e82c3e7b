"""Small programs, each of which trains in its own way and returns the result."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.exchange.agreement_exchange import AgreedExchange
from lagom.session.session import Session

Program = Callable[[Any], list[Tensor]]


def data(count: int = 14) -> TensorDataset:
    x = torch.randn(count, 2, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x[:, :1]))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weights(*modules: nn.Module) -> list[Tensor]:
    return [parameter.detach() for module in modules for parameter in module.parameters()]


def loop(model: nn.Module, step: Callable[[Tensor, Tensor], None], count: int = 14, batch_size: int = 6) -> None:
    loader = DataLoader(data(count), batch_size=batch_size, shuffle=True)
    for _ in range(2):
        for x, y in loader:
            step(x, y)


def sgd(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], rate: float = 0.1, **options: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    loop(model, step, **options)
    return weights(model)


def mse(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: nn.functional.mse_loss(model(x), y)


def plain(_: Session) -> list[Tensor]:
    model = mlp()
    return sgd(model, mse(model))


def short_tail(_: Session) -> list[Tensor]:
    model = mlp()
    return sgd(model, mse(model), count=7, batch_size=6)


def several_backwards(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (x, y) in enumerate(DataLoader(data(), batch_size=5)):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        torch.autograd.backward([nn.functional.l1_loss(model(x), y), next(model.parameters()).square().sum()])
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model) + [p.grad for p in model.parameters() if p.grad is not None]


def two_forwards(_: Session) -> list[Tensor]:
    model = mlp()
    return sgd(model, lambda x, y: (model(x) - y).square().mean() + (model(x + 1) - y).abs().mean())


def leaf_tensors(session: Session) -> list[Tensor]:
    w = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    b = torch.randn(1, dtype=torch.float64).requires_grad_()
    for _ in range(2):
        for x, y in DataLoader(data(), batch_size=6):
            (x @ w + b - y).square().mean().backward()
            with torch.no_grad():
                for leaf in (w, b):
                    assert leaf.grad is not None
                    leaf -= 0.1 * leaf.grad
                    leaf.grad = None
    return [w.detach(), b.detach()]


def no_optimizer(session: Session) -> list[Tensor]:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> None:
        model.zero_grad()
        nn.functional.mse_loss(model[1:](model[0](x)), y).backward(torch.tensor(0.5, dtype=torch.float64))
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)

    loop(model, step)
    return weights(model)


def reentrant(_: Session) -> list[Tensor]:
    model = mlp()
    return sgd(model, mse(lambda x: model[2](checkpoint(model[:2], x.requires_grad_(), use_reentrant=True))))


def deepcopied(_: Session) -> list[Tensor]:
    first = mlp()
    second = copy.deepcopy(first)
    sgd(first, mse(first))
    sgd(second, mse(second))
    return weights(first, second)


def unpickled(_: Session) -> list[Tensor]:
    model = pickle.loads(pickle.dumps(mlp()))
    return sgd(model, mse(model))


def lazy(_: Session) -> list[Tensor]:
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(1)).double()
    model(torch.zeros(1, 2, dtype=torch.float64))
    return sgd(model, mse(model))


def inputs_only(_: Session) -> list[Tensor]:
    model = mlp()
    x, y = next(iter(DataLoader(data(), batch_size=9)))
    nn.functional.mse_loss(model(x), y).backward(inputs=[model[0].weight])
    assert model[2].weight.grad is None
    return [model[0].weight.grad]  # type: ignore[list-item]


def over(model: nn.Module, batches: Iterable[Any]) -> list[Tensor]:
    """Take a step for each of ``batches``."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def full_batch(_: Session) -> list[Tensor]:
    model = mlp()
    return over(model, 3 * list(DataLoader(data(7), batch_size=7)))


def kept_batches(_: Session) -> list[Tensor]:
    model = mlp()
    batches = list(DataLoader(data(), batch_size=5, shuffle=True))  # the last has 4 samples
    return over(model, batches + batches[::-1])


def one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    following = next(batches)
    while following is not None:
        current, following = following, next(batches, None)
        yield current


def fetched_ahead(_: Session) -> list[Tensor]:
    model = mlp()
    return over(model, one_ahead(iter(DataLoader(data(13), batch_size=4, shuffle=True))))  # the last has 1 sample


def compiled(_: Session) -> list[Tensor]:
    model = mlp()
    fast = torch.compile(model, backend="eager")
    return sgd(model, mse(lambda x: fast(x)))


def compiled_loss(_: Session) -> list[Tensor]:
    model = mlp()
    return sgd(model, torch.compile(mse(model), backend="eager", fullgraph=True))


def large(_: Session) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(2, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1)).double()
    return sgd(model, mse(model), rate=0.001)


def without_a_frame(session: Session) -> list[Tensor]:
    if session.group is not None and session.backwards.gradient_averager is not None:
        session.backwards.gradient_averager._averager._frame = AgreedExchange(session.group, 0)
    return large(session) + plain(session)


PROGRAMS: list[Program] = [
    plain,
    short_tail,
    several_backwards,
    two_forwards,
    leaf_tensors,
    no_optimizer,
    reentrant,
    deepcopied,
    unpickled,
    lazy,
    inputs_only,
    full_batch,
    kept_batches,
    fetched_ahead,
    compiled,
    compiled_loss,
    large,
    without_a_frame,
]
