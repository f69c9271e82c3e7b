"""Programs whose modules ranks share out by rows, or compute whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.disk import asked_for_rank


class Settings:
    """Settings that forwards can see beside their arguments."""

    is_deep = False

    def __init__(self) -> None:
        self.scale, self.losses = 1.0, list[float]()


class Network(nn.Module):
    """Computes rows one by one; another way once its settings say so."""

    def __init__(self, settings: Settings, *extra: nn.Module) -> None:
        super().__init__()
        self.settings, self.activate = settings, torch.tanh
        self.layers = nn.Sequential(nn.Linear(5, 16), *extra, nn.Linear(16, 16))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.activate(self.layers(x)) * self.settings.scale
        return self.last(torch.tanh(x) if self.settings.is_deep else x)


class Centred(Network):
    """Mixes the rows of a batch, so that it runs whole on every rank."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x - x.mean(0))


def train(
    make: Callable[[Settings], list[nn.Module]], dtype: torch.dtype, num_accumulated: int = 1, num_epochs: int = 2
) -> Any:
    """Train modules in turn, and evaluate them; return the losses and the weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(33, 5, generator=generator).to(dtype)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    settings, Settings.is_deep = Settings(), False
    models = [model.to(dtype) for model in make(settings)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    for epoch in range(num_epochs):
        for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=6, shuffle=True)):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                settings.losses.append(loss.item())
                if step % num_accumulated == num_accumulated - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        settings.scale, Settings.is_deep = 0.9 - 0.1 * epoch, epoch == 0
        for model in models:
            model.eval()
            with torch.no_grad():
                for inputs, targets in DataLoader(data, batch_size=10):
                    settings.losses.append(nn.functional.l1_loss(model(inputs), targets).item())
            model.train()
    return settings.losses, [one.tolist() for model in models for one in model.state_dict().values()]


def by_rows(settings: Settings) -> list[nn.Module]:
    return [Network(settings, nn.Dropout(0.1), nn.BatchNorm1d(16))]


def both(settings: Settings) -> list[nn.Module]:
    return [Network(settings), Centred(settings)]


def after_asking(settings: Settings) -> list[nn.Module]:
    asked_for_rank()
    return [Centred(settings)]


def large(settings: Settings) -> list[nn.Module]:
    """Make a module whose gradients travel during its backward, and another, whose gradients are few."""

    class Large(Centred):
        def __init__(self) -> None:
            super().__init__(settings)
            self.offsets = nn.Parameter(torch.zeros(1 << 20))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + self.offsets.mean()

    return [Large(), Centred(settings)]
