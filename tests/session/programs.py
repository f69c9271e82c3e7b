"""Small programs, each of which trains in its own way and returns the result."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.collectives.agreement_exchange import AgreedExchange
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


def frozen_then_unfrozen(_: Session) -> list[Tensor]:
    model, unused = mlp(), nn.Linear(3, 3)
    model[0].requires_grad_(False)
    sgd(model, mse(model))
    model[0].requires_grad_(True)
    assert unused.weight.grad is None
    return sgd(model, mse(model)) + weights(unused)


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


def lbfgs(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    x, y = data().tensors

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights(model)


def reentrant(_: Session) -> list[Tensor]:
    model = mlp()
    return sgd(model, mse(lambda x: model[2](checkpoint(model[:2], x.requires_grad_(), use_reentrant=True))))


def non_reentrant(_: Session) -> list[Tensor]:
    model = mlp()
    return sgd(model, mse(lambda x: model[2](checkpoint(model[:2], x, use_reentrant=False))))


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


def full_batch(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = next(iter(DataLoader(data(7), batch_size=7)))
    for _step in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def kept_batches(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = list(DataLoader(data(), batch_size=5, shuffle=True))  # the last has 4 samples
    for x, y in batches + batches[::-1]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def fetched_ahead(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(DataLoader(data(13), batch_size=4, shuffle=True))  # the last has 1 sample
    following = next(batches)
    while following is not None:
        (x, y), following = following, next(batches, None)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def sparse(_: Session) -> list[Tensor]:
    table, head = nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.1)
    for ids, y in DataLoader(TensorDataset(torch.arange(9), torch.randn(9, 1)), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(head(table(ids)), y).backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        optimizer.step()
    return [p.double() for p in weights(table, head)]


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
    if session.group is not None and session.replicate is not None:
        session.replicate._averager._frame = AgreedExchange(session.group, 0)
    return large(session) + plain(session)


PROGRAMS: list[Program] = [
    plain,
    short_tail,
    several_backwards,
    two_forwards,
    frozen_then_unfrozen,
    leaf_tensors,
    no_optimizer,
    lbfgs,
    reentrant,
    non_reentrant,
    deepcopied,
    unpickled,
    lazy,
    inputs_only,
    full_batch,
    kept_batches,
    fetched_ahead,
    sparse,
    compiled,
    compiled_loss,
    large,
    without_a_frame,
]
