"""Gradients that are taken by hand, of inputs and of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import model, network, noised, normed, trained


@model
def penalty_through_batch_norm() -> Any:
    critic = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        between = (0.3 * x + 0.7 * noised(x)).requires_grad_()
        out = critic(between)
        (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
        return critic(x).mean() - critic(noised(x)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return trained(loss, critic)


@model
def inner_step_of_weights() -> Any:
    net = network(nn.LayerNorm(12))

    def loss(x: Tensor, y: Tensor) -> Any:
        weights: dict[str, Tensor] = dict(net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(net, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(net, fast, (noised(x),)), y)

    return trained(loss, net)
