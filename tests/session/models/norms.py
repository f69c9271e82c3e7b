"""Normalisation of many kinds, each called twice before a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import (
    MODELS,
    WIDTH,
    batches,
    model,
    module,
    network,
    noised,
    normed,
    of_images,
    trained,
    trained_on_pairs,
)


def of_norm(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], Any]:
    def train() -> Any:
        net = network(kind(*args, **options).double())
        return trained(lambda x, y: F.mse_loss(net(x) + net(noised(x)), y), net)

    return train


class Renorm(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own, which calls that of its base."""

    def forward(self, input: Tensor) -> Any:
        out = super().forward(input)
        return out * 1.5 + self.running_mean.detach().clone() * 0.1 if self.running_mean is not None else out


class ByHand(nn.BatchNorm1d):
    """A BatchNorm that computes everything itself."""

    def forward(self, input: Tensor) -> Any:
        assert self.running_mean is not None
        if not self.training:
            return (input - self.running_mean) * self.weight + self.bias
        mean, var = input.mean(0), input.var(0, unbiased=False)
        with torch.no_grad():
            self.running_mean += 0.1 * (mean - self.running_mean)
        return (input - mean) / (var + self.eps).sqrt() * self.weight + self.bias


MODELS["momentum_none"] = of_norm(nn.BatchNorm1d, 12, momentum=None)
MODELS["momentum_zero"] = of_norm(nn.BatchNorm1d, 12, momentum=0.0)
MODELS["momentum_one"] = of_norm(nn.BatchNorm1d, 12, momentum=1.0)
MODELS["not_affine"] = of_norm(nn.BatchNorm1d, 12, affine=False)
MODELS["no_running_statistics"] = of_norm(nn.BatchNorm1d, 12, track_running_stats=False)
MODELS["lazy_batch_norm"] = of_norm(nn.LazyBatchNorm1d)
MODELS["large_epsilon"] = of_norm(nn.BatchNorm1d, 12, eps=0.1)
MODELS["layer_norm"] = of_norm(nn.LayerNorm, 12)
MODELS["group_norm"] = of_norm(nn.GroupNorm, 3, 12)
MODELS["rms_norm"] = of_norm(nn.RMSNorm, 12)
MODELS["subclass"] = of_norm(Renorm, 12)
MODELS["subclass_by_hand"] = of_norm(ByHand, 12)


@model
def batch_norm_1d_of_sequences() -> Any:
    body = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool1d(1))
    return of_images(nn.Sequential(body, nn.Flatten(), nn.Linear(4, 1)).double(), (2, 36))


@model
def batch_norm_2d() -> Any:
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
    return of_images(nn.Sequential(body, nn.Flatten(), nn.Linear(4, 1)).double(), (2, 6, 6))


@model
def batch_norm_3d() -> Any:
    body = nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool3d(1))
    return of_images(nn.Sequential(body, nn.Flatten(), nn.Linear(4, 1)).double(), (2, 3, 3, 4))


@model
def channels_last() -> Any:
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net: Any = nn.Sequential(body, nn.Linear(4, 1)).double()
    net.to(memory_format=torch.channels_last)
    return of_images(net, (2, 6, 6))


@model
def instance_norm_with_running_statistics() -> Any:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    body = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return of_images(nn.Sequential(body, nn.Linear(4, 1)).double(), (2, 6, 6))


@model
def shared_norm_between_branches() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.out((self.norm(self.left(x)) + self.norm(self.right(x.sin()))).tanh())

    return trained_on_pairs(
        module(
            forward,
            left=nn.Linear(WIDTH, 12),
            right=nn.Linear(WIDTH, 12),
            norm=nn.BatchNorm1d(12),
            out=nn.Linear(12, 1),
        )
    )


@model
def frozen_norm() -> Any:
    net: Any = normed()
    for warm, _ in batches(1):
        net(warm)
    net[1].requires_grad_(False).eval()
    return trained_on_pairs(net)


@model
def norm_in_eval_mode_in_a_model_in_training() -> Any:
    net: Any = nn.Sequential(normed(last=12), nn.BatchNorm1d(12), nn.Linear(12, 1)).double()
    net[0][1].eval()
    return trained_on_pairs(net)


@model
def norm_that_changes_mode_between_forwards() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        net.train()
        one = net(x)
        net.eval()
        two = net(noised(x))
        net.train()
        return F.mse_loss(one, y) + F.mse_loss(two, y)

    return trained(loss, net)


@model
def two_dimensional_statistics_of_a_memory() -> Any:
    """A norm over something that is no batch, beside one over the batch."""

    def forward(self: Any, x: Tensor) -> Any:
        prompt = self.norm(self.prompts).mean(0)
        return self.body(self.norm(x) + prompt)

    return trained_on_pairs(
        module(forward, prompts=nn.Parameter(torch.randn(5, WIDTH)), norm=nn.BatchNorm1d(WIDTH), body=normed())
    )
