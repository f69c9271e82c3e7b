"""Random numbers in forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import (
    around,
    batches,
    model,
    module,
    normed,
    of_images,
    trained_by_step,
    trained_on_pairs,
)


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
def gumbel() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.out(F.gumbel_softmax(self.body(x), tau=0.7))

    return trained_on_pairs(module(forward, body=normed(last=3), out=nn.Linear(3, 1)))


@model
def dropout_in_inference_mode() -> Any:
    """Dropout that stays on, as for Monte Carlo estimates; in inference mode torch hands it over whole."""
    net = module(lambda self, x: self.out(self.drops(self.body(x))), body=normed(last=4), drops=nn.Sequential())
    net.drops.extend([nn.Dropout(0.3), nn.AlphaDropout(0.3)])
    net.out = nn.Linear(4, 1).double()

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        with torch.inference_mode(step > 2), torch.no_grad():
            found = sum(net(x).square().sum().item() for _ in range(3))
        return F.mse_loss(net(x), y) * found

    return trained_by_step(loss, net)


@model
def decision_in_inference_mode() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.body(x) * (1 + len(torch.where(x > 5)[0]))
        return y * 2 if x.max() > 5 else y

    net = around(forward)
    with torch.inference_mode():
        return [net(x * step).square().sum().item() for step in range(1, 9) for x, _ in batches(1)]


@model
def sequences_of_one_step_at_first() -> Any:
    """Rows and steps can be exchanged only while there is one step."""

    def forward(self: Any, x: Tensor) -> Any:
        x = self.into(x.unsqueeze(-1)).transpose(0, 1)
        length, rows = x.shape[:2]
        x = F.dropout(x.reshape(length * rows, -1), 0.3)
        return self.out(x).view(length, rows).transpose(0, 1)

    net = module(forward, into=nn.Linear(1, 4), out=nn.Linear(4, 1))
    return trained_by_step(lambda step, x, y: (net(x[:, : 1 if step < 4 else 5]) - y).square().sum(), net)


@model
def strided_sequences_of_one_step_at_first() -> Any:
    """The size that is 1 at first is one inside the forward."""

    def forward(self: Any, x: Tensor) -> Any:
        x = self.into(x[:, ::3].unsqueeze(-1)).transpose(0, 1)
        length, rows = x.shape[:2]
        x = F.dropout(x.reshape(length * rows, -1), 0.3)
        return self.out(x).view(length, rows).transpose(0, 1)

    net = module(forward, into=nn.Linear(1, 4), out=nn.Linear(4, 1))
    return trained_by_step(lambda step, x, y: (net(x[:, : 3 if step < 4 else 6]) - y).square().sum(), net)
