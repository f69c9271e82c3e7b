"""Tasks with loops of their own: text, pseudo-labels, reinforcement, adversaries, searches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Subset,
    TensorDataset,
)

from tests.session.models.loops import classifier, fitted, samples
from tests.session.models.training import model, state_of


@model
def two_loaders_of_different_lengths() -> Any:
    net = classifier()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    target = iter(DataLoader(samples(23), 5, shuffle=True))
    for x, y in DataLoader(samples(), 8, shuffle=True):
        try:
            other, _ = next(target)
        except StopIteration:
            target = iter(DataLoader(samples(23), 5, shuffle=True))
            other, _ = next(target)
        out = net(torch.cat([x, other]))
        entropy = -(out[len(x) :].softmax(1) * out[len(x) :].log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        (F.cross_entropy(out[: len(x)], y) + 0.1 * entropy).backward()
        optimizer.step()
    return state_of(net)


@model
def pseudo_labels() -> Any:
    net = classifier()
    found = fitted(net)
    net.eval()
    with torch.no_grad():
        out = torch.cat([net(x) for x, _ in DataLoader(samples(50), 16)])
    sure = out.softmax(1).amax(1) > 0.4
    data = TensorDataset(samples(50).tensors[0][sure], out.argmax(1)[sure])
    return [*found, int(sure.sum()), *fitted(net, loader=DataLoader(data, 8, shuffle=True), epochs=1)]


@model
def curriculum_by_losses() -> Any:
    net, data = classifier(), samples()
    found = []
    for _ in range(3):
        net.eval()
        with torch.no_grad():
            scores = torch.cat([F.cross_entropy(net(x), y, reduction="none") for x, y in DataLoader(data, 8)])
        easy = Subset(data, scores.argsort()[:26].tolist())
        found += fitted(net, loader=DataLoader(easy, 8, shuffle=True), epochs=1)
    return found
