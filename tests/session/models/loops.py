"""Ordinary training loops, with what is usual around them: losses, samplers, metrics, schedules and evaluations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from tests.session.models.training import model, state_of

CLASSES = 3


def samples(num: int = 37, width: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num, width, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def classifier(*extra: nn.Module, width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), *extra, nn.Linear(16, CLASSES)).double()


def fitted(
    net: nn.Module, loss_of: Any = F.cross_entropy, *, loader: Any = None, epochs: int = 2, each: Any = None
) -> list[Any]:
    """Losses, accuracies and weights of a usual loop, with an evaluation after each epoch."""
    loader = loader if loader is not None else DataLoader(samples(), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    history = []
    for epoch in range(epochs):
        net.train()
        total, right, num = 0.0, 0, 0
        for x, y in loader:
            optimizer.zero_grad()
            out = net(x)
            loss = loss_of(out, y)
            loss.backward()
            optimizer.step()
            if each is not None:
                each(net)
            total += loss.item() * len(x)
            right += int((out.argmax(1) == y).sum())
            num += len(x)
        history.append((epoch, total / num, right / num, *evaluated(net)))
    return [history, *state_of(net)]


def evaluated(net: nn.Module, num: int = 21) -> list[Any]:
    net.eval()
    outs, targets = [], []
    with torch.no_grad():
        for x, y in DataLoader(samples(num), batch_size=8):
            outs.append(net(x))
            targets.append(y)
    out, target = torch.cat(outs), torch.cat(targets)
    confusion = torch.zeros(CLASSES, CLASSES)
    for p, t in zip(out.argmax(1), target, strict=True):
        confusion[t, p] += 1
    return [F.cross_entropy(out, target).item(), (out.argmax(1) == target).double().mean().item(), confusion.tolist()]


@model
def masked_sum() -> Any:
    def loss(out: Tensor, y: Tensor) -> Any:
        mask = (y > 0).to(out)
        return (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    return fitted(classifier(), loss)


@model
def supervised_contrast() -> Any:
    def loss(out: Tensor, y: Tensor) -> Any:
        z = F.normalize(out, dim=1)
        same = (y[:, None] == y[None]).to(z) - torch.eye(len(y), dtype=z.dtype)
        return -((z @ z.T / 0.5).log_softmax(1) * same).sum(1).div(same.sum(1).clamp(min=1)).mean()

    return fitted(classifier(), loss)


@model
def hardest_triplets() -> Any:
    def loss(out: Tensor, y: Tensor) -> Any:
        apart = torch.cdist(out, out)
        same = y[:, None] == y[None]
        far = (apart - 1e9 * ~same).amax(1)
        near = (apart + 1e9 * same).amin(1)
        return F.relu(far - near + 0.5).clamp(max=5).mean()

    return fitted(classifier(), loss)


@model
def split_at_random() -> Any:
    train, rest = random_split(samples(40), [31, 9])
    found = fitted(classifier(), loader=DataLoader(train, batch_size=6, shuffle=True, drop_last=True))
    return [*found, list(rest.indices)]


@model
def average_of_weights() -> Any:
    net = classifier()
    average = AveragedModel(net)
    found = fitted(net, each=average.update_parameters)
    update_bn(DataLoader(samples(), 8), average)
    return [*found, *state_of(average), *evaluated(average)]


class Stream(IterableDataset[Any]):
    """Samples one after the other."""

    def __iter__(self) -> Any:
        yield from (samples()[i] for i in range(29))


@model
def stream() -> Any:
    return fitted(classifier(), loader=DataLoader(Stream(), batch_size=6))


class Alternating(Sampler[int]):
    """Samples from both ends, in an order drawn anew each time."""

    def __iter__(self) -> Any:
        half = torch.randperm(18).tolist()
        return iter([i for j in half for i in (j, 36 - j)])

    def __len__(self) -> int:
        return 36


@model
def sampler_of_its_own() -> Any:
    return fitted(classifier(), loader=DataLoader(samples(), batch_size=8, sampler=Alternating()))


@model
def samples_by_weight() -> Any:
    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(37)], 30)
    return fitted(classifier(), loader=DataLoader(samples(), batch_size=7, sampler=sampler))


@model
def last_batch_of_one_sample() -> Any:
    net = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, CLASSES)).double()
    return fitted(net, loader=DataLoader(samples(25), batch_size=8, shuffle=True))


@model
def batches_smaller_than_the_ranks() -> Any:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    return [*fitted(net, loader=DataLoader(samples(7), batch_size=2)), *fitted(net, loader=DataLoader(samples(3)))]
