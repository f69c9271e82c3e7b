"""Random numbers in forwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import model, module, normed, of_images, trained_on_pairs


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
