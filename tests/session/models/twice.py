"""Several forwards of one model before one backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import batches, model, noised, normed, state_of, trained, trained_on_pairs


@model
def siamese() -> Any:
    net = normed()
    return trained_on_pairs(net)


@model
def siamese_whose_first_call_is_a_siamese_one_of_another_size() -> Any:
    net = normed()
    return trained(lambda x, y: F.mse_loss(net(x), y) + net(noised(x)[: len(x) // 2 + 1]).square().sum(), net)


@model
def simsiam() -> Any:
    encoder = nn.Sequential(normed(last=12), nn.BatchNorm1d(12, affine=False)).double()
    predictor = nn.Sequential(nn.Linear(12, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 12)).double()

    def loss(x: Tensor, _: Tensor) -> Any:
        z1, z2 = encoder(noised(x)), encoder(noised(x))
        p1, p2 = predictor(z1), predictor(z2)
        return -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2

    return trained(loss, encoder, predictor)


@model
def byol() -> Any:
    online, predictor = normed(last=4), nn.Linear(4, 4).double()
    target = copy.deepcopy(online).requires_grad_(False)

    def loss(x: Tensor, _: Tensor) -> Any:
        with torch.no_grad():
            for ours, its in zip(target.parameters(), online.parameters(), strict=True):
                ours.mul_(0.9).add_(its, alpha=0.1)
            wanted = [target(noised(x)), target(x)]
        found = [predictor(online(x)), predictor(online(noised(x)))]
        return sum(2 - 2 * F.cosine_similarity(one, two).mean() for one, two in zip(found, wanted, strict=True))

    return [*trained(loss, online, predictor), *state_of(target)]


@model
def forward_twice_and_two_backwards() -> Any:
    net = normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        first, second = F.mse_loss(net(x), y), net(noised(x)).square().mean()
        first.backward()
        second.backward()
        optimizer.step()
        losses += [first.item(), second.item()]
    return [losses, *state_of(net)]


@model
def retained_graph() -> Any:
    net = normed(last=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        out = net(x)
        F.mse_loss(out[:, :1], y).backward(retain_graph=True)
        net(noised(x))
        out[:, 1].square().sum().backward()
        optimizer.step()
    return state_of(net)


@model
def evaluation_between_the_forward_and_its_backward() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        out = net(x)
        net.eval()
        kept = net(x)
        with torch.no_grad():
            wanted = net(noised(x))
        net.train()
        return F.mse_loss(out, y) + F.mse_loss(kept, wanted)

    return trained(loss, net)


@model
def two_inputs_of_different_sizes() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        support, query = x[: len(x) // 2], x[len(x) // 2 :]
        return F.mse_loss(net(query), y[len(x) // 2 :]) + (net(support).mean() - y.mean()).square()

    return trained(loss, net)
