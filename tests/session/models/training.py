"""How each model is trained for a few steps; ``test_sliced_models.py`` compares ranks with one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 6
MODELS: dict[str, Callable[[], Any]] = {}
"""Each trains a model and returns its losses, weights and buffers."""


def model(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have ``function`` be one of the models."""
    MODELS[function.__name__] = function
    return function


def batches(epochs: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    """A batch of 8 and one of 5, with other samples each epoch."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(13, WIDTH, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)
    for _ in range(epochs):
        yield from loader


def state_of(*modules: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for module in modules for tensor in module.state_dict().values()]


def trained(loss_of: Callable[[Tensor, Tensor], Tensor], *modules: nn.Module, epochs: int = 2) -> list[Any]:
    """Losses of all steps, and weights and buffers in the end."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for x, y in batches(epochs):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *state_of(*modules)]


def trained_on_pairs(net: nn.Module) -> Any:
    """Train ``net``, in double precision, by a loss of two of its forwards."""
    net.double()
    return trained(lambda x, y: F.mse_loss(net(x) - net(noised(x)), y), net)


def trained_by_step(loss_of: Callable[[int, Tensor, Tensor], Tensor], net: nn.Module) -> list[Any]:
    """Train ``net`` for three epochs by a loss that also gets the number of the step, from 1."""
    steps = itertools.count(1)
    return trained(lambda x, y: loss_of(next(steps), x, y), net, epochs=3)


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Take one step of ``optimizer``; return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Around(nn.Module):
    """A network, and what a subclass does around it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()


def module(forward: Callable[..., Any], **attributes: Any) -> Any:
    """Make a module of its own class, with this ``forward`` and ``attributes``, in double precision."""
    net = type("Module", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net.double()


def around(forward: Callable[..., Any], **attributes: Any) -> Any:
    """Make a module with this ``forward`` around ``self.body``, a network."""
    return module(forward, body=network(), **attributes)


def network(*extra: nn.Module, last: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 12), *extra, nn.Tanh(), nn.Linear(12, last)).double()


def normed(last: int = 1) -> nn.Sequential:
    return network(nn.BatchNorm1d(12), last=last)


def noised(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def of_images(net: nn.Module, shape: tuple[int, ...]) -> Any:
    def loss(x: Tensor, y: Tensor) -> Any:
        images = (x[:, :1, None] * torch.linspace(-1, 1, 72, dtype=x.dtype) + x[:, 1:2, None]).sin()
        images = images.view(len(x), *shape)
        return F.mse_loss(net(images) + net(noised(images)), y)

    return trained(loss, net)
