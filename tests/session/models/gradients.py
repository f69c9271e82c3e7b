"""Gradients that are taken by hand, of inputs and of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import batches, model, network, noised, normed, state_of, trained


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
def r1_penalty() -> Any:
    critic = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        x = x.clone().requires_grad_()
        real, fake = critic(x), critic(noised(x.detach()))
        (slope,) = torch.autograd.grad(real.sum(), x, create_graph=True)
        return F.softplus(fake).mean() + F.softplus(-real).mean() + slope.square().sum(1).mean()

    return trained(loss, critic)


@model
def gradients_taken_by_hand() -> Any:
    net = normed()
    losses = []
    for x, y in batches():
        loss = F.mse_loss(net(x) - net(noised(x)), y)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.05 * gradient)
        losses.append(loss.item())
    return [losses, *state_of(net)]


@model
def attack_by_gradients_of_the_input() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        shifted = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(net(shifted), y), shifted)
        return F.mse_loss(net(x + 0.1 * slope.sign()), y) + F.mse_loss(net(x), y)

    return trained(loss, net)


@model
def gradient_of_a_gradient() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        inner = F.mse_loss(net(x), y)
        gradients = torch.autograd.grad(inner, list(net.parameters()), create_graph=True)
        return inner + 0.1 * sum(g.square().sum() for g in gradients)

    return trained(loss, net)


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


@model
def accumulated() -> Any:
    net = normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step, (x, y) in enumerate(batches(3)):
        loss = F.mse_loss(net(x) - net(noised(x)), y) / 2
        loss.backward()
        if step % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, *state_of(net)]
