"""Random numbers in forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import (
    WIDTH,
    model,
    noised,
    normed,
    of_images,
    trained,
)


@model
def dropout_of_all_kinds() -> Any:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
            self.drops = nn.ModuleList([nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.3)])
            self.out = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Any:
            x = self.norm(self.conv(x))
            for drop in self.drops:
                x = drop(x)
            return F.dropout(self.out(x.mean((2, 3))), 0.2, training=self.training)

    return of_images(Dropping().double(), (2, 6, 6))


@model
def feature_alpha_dropout() -> Any:
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.FeatureAlphaDropout(0.4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return of_images(nn.Sequential(body, nn.Linear(4, 1)).double(), (2, 6, 6))


@model
def stochastic_depth() -> Any:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(WIDTH, 12), nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
            self.out = nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            for block in self.blocks:
                if not self.training or torch.rand(()) < 0.6:
                    x = x + block(x).tanh()
            return self.out(x)

    net = Deep().double()
    return trained(lambda x, y: F.mse_loss(net(x) - net(noised(x)), y), net)


@model
def drop_path() -> Any:
    class Paths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            mask = x.new_empty(x.shape[0], 1).bernoulli_(0.7).div_(0.7)
            return self.out(x + mask * self.norm(x).tanh())

    net = Paths().double()
    return trained(lambda x, y: F.mse_loss(net(x) - net(noised(x)), y), net)


@model
def gumbel() -> Any:
    class Gumbel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out = normed(last=3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Any:
            return self.out(F.gumbel_softmax(self.body(x), tau=0.7))

    net = Gumbel().double()
    return trained(lambda x, y: F.mse_loss(net(x) - net(noised(x)), y), net)


@model
def reparametrised() -> Any:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = normed(last=4), nn.Linear(2, WIDTH)

        def forward(self, x: Tensor) -> Any:
            mean, spread = self.encode(x).chunk(2, 1)
            sampled = torch.distributions.Normal(mean, (spread / 2).exp()).rsample()
            return self.decode(sampled), mean, spread

    net = Auto().double()

    def loss(x: Tensor, _: Tensor) -> Any:
        out, mean, spread = net(x)
        return F.mse_loss(out, x) - 0.05 * (1 + spread - mean.square() - spread.exp()).sum()

    return trained(loss, net)
