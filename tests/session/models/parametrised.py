"""Weights that are computed from others, or shared."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.session.models.training import WIDTH, model, network, noised, normed, trained, trained_on_pairs


@model
def spectral_norm_of_old() -> Any:
    net = network()
    nn.utils.spectral_norm(net[0])
    return trained_on_pairs(net)


@model
def orthogonal() -> Any:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)).double()
    parametrizations.orthogonal(net[0])
    return trained_on_pairs(net)


@model
def cached_parametrization() -> Any:
    net = normed()
    parametrizations.weight_norm(net[0])

    def loss(x: Tensor, y: Tensor) -> Any:
        with nn.utils.parametrize.cached():
            return F.mse_loss(net(x) - net(noised(x)), y)

    return trained(loss, net)


@model
def pruned() -> Any:
    net = normed()
    prune.l1_unstructured(net[0], "weight", 0.4)
    return trained_on_pairs(net)


@model
def weights_tied() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.norm, self.decode = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH)
            self.decode.weight = nn.Parameter(self.encode.weight.T.clone())
            self.again = nn.Linear(WIDTH, 12)
            self.again.weight = self.encode.weight

        def forward(self, x: Tensor) -> Any:
            hidden = self.norm(self.encode(x)).tanh()
            return F.linear(hidden, self.encode.weight.T) + self.again(x)[:, :WIDTH] + self.decode(hidden)

    net = Tied().double()
    return trained(lambda x, _: F.mse_loss(net(x), x) + F.mse_loss(net(noised(x)), x), net)
