"""Random numbers in forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import WIDTH, model, module, normed, of_images, trained, trained_on_pairs


@model
def dropout_of_all_kinds() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.norm(self.conv(x))
        for drop in self.drops:
            x = drop(x)
        return F.dropout(self.out(x.mean((2, 3))), 0.2, training=self.training)

    return of_images(
        module(
            forward,
            conv=nn.Conv2d(2, 4, 3),
            norm=nn.BatchNorm2d(4),
            drops=nn.ModuleList([nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.3)]),
            out=nn.Linear(4, 1),
        ),
        (2, 6, 6),
    )


@model
def feature_alpha_dropout() -> Any:
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.FeatureAlphaDropout(0.4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return of_images(nn.Sequential(body, nn.Linear(4, 1)).double(), (2, 6, 6))


@model
def stochastic_depth() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.6:
                x = x + block(x).tanh()
        return self.out(x)

    return trained_on_pairs(
        module(
            forward,
            first=nn.Linear(WIDTH, 12),
            blocks=nn.ModuleList([nn.Linear(12, 12) for _ in range(3)]),
            out=nn.Linear(12, 1),
        )
    )


@model
def drop_path() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        mask = x.new_empty(x.shape[0], 1).bernoulli_(0.7).div_(0.7)
        return self.out(x + mask * self.norm(x).tanh())

    return trained_on_pairs(module(forward, first=nn.Linear(WIDTH, 12), norm=nn.BatchNorm1d(12), out=nn.Linear(12, 1)))


@model
def gumbel() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.out(F.gumbel_softmax(self.body(x), tau=0.7))

    return trained_on_pairs(module(forward, body=normed(last=3), out=nn.Linear(3, 1)))


@model
def reparametrised() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        mean, spread = self.encode(x).chunk(2, 1)
        sampled = torch.distributions.Normal(mean, (spread / 2).exp()).rsample()
        return self.decode(sampled), mean, spread

    net = module(forward, encode=normed(last=4), decode=nn.Linear(2, WIDTH))

    def loss(x: Tensor, _: Tensor) -> Any:
        out, mean, spread = net(x)
        return F.mse_loss(out, x) - 0.05 * (1 + spread - mean.square() - spread.exp()).sum()

    return trained(loss, net)
