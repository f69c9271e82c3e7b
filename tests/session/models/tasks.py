"""Tasks with loops of their own: text, pseudo-labels, reinforcement, adversaries, searches."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
)

from tests.session.models.loops import CLASSES, classifier, fitted, samples
from tests.session.models.training import model, state_of, take_step


class Sentences(Dataset[Any]):
    """Token lists of different lengths."""

    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> Any:
        tokens = torch.arange(2 + index % 5) * (index + 1) % 11 + 1
        return tokens, int(tokens.sum()) % CLASSES


def padded(batch: list[Any]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([t for t, _ in batch], batch_first=True)
    return {
        "tokens": tokens,
        "lengths": torch.tensor([len(t) for t, _ in batch]),
        "y": torch.tensor([y for _, y in batch]),
    }


class OfText(nn.Module):
    """A classifier of padded sentences; ``way`` says how it deals with the padding."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encode, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
        x = self.embed(tokens)
        if self.way == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.out(self.lstm(packed)[1][0][-1])
        mask = tokens == 0
        x = self.encode(x, src_key_padding_mask=mask)
        if x.shape[1] < tokens.shape[1]:
            mask = mask[:, : x.shape[1]]
        return self.out((x * ~mask[:, :, None]).sum(1) / lengths[:, None])


def of_text(way: str) -> Any:
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")  # of an encoder that evaluates
    net = OfText(way).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        net.train()
        batches = DataLoader(Sentences(), 6, shuffle=True, collate_fn=padded)
        losses += [take_step(optimizer, F.cross_entropy(net(b["tokens"], b["lengths"]), b["y"])) for b in batches]
        net.eval()
        with torch.no_grad():
            outs = [net(b["tokens"], b["lengths"]) for b in DataLoader(Sentences(), 6, collate_fn=padded)]
        losses.append(torch.cat(outs).square().sum().item())
    return [losses, *state_of(net)]


@model
def packed_sentences() -> Any:
    return of_text("packed")


@model
def masked_sentences() -> Any:
    return of_text("masked")


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
def frozen_backbone() -> Any:
    body, head = classifier(), nn.Linear(CLASSES, CLASSES).double()
    body.requires_grad_(False).eval()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    losses = []
    for x, y in DataLoader(samples(), 8, shuffle=True):
        with torch.no_grad():
            features = body(x)
        losses.append(take_step(optimizer, F.cross_entropy(head(features), y)))
    return [losses, *state_of(head, body)]


@model
def uncertainty_by_dropout() -> Any:
    net = classifier(nn.Dropout(0.4))
    found = fitted(net)
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with torch.no_grad():
        draws = torch.stack([torch.cat([net(x) for x, _ in DataLoader(samples(21), 8)]) for _ in range(4)])
    return [*found, draws.mean(0), draws.std(0)]


@model
def policy_gradient() -> Any:
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state, rewards = torch.ones(4, 5, dtype=torch.float64), []
    for _ in range(6):
        logs, gains = [], []
        for _ in range(3):
            chosen = torch.distributions.Categorical(logits=net(state))
            action = chosen.sample()
            logs.append(chosen.log_prob(action))
            gains.append(action.to(state) - random.random())
            state = (state + 0.1 * torch.randn_like(state)).clamp(-2, 2)
        take_step(optimizer, -(torch.stack(logs) * torch.stack(gains)).sum())
        rewards.append(torch.stack(gains).sum().item())
    return [rewards, *state_of(net)]


@model
def wasserstein_with_noise() -> Any:
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)).double()
    critic = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    of_maker, of_critic = (torch.optim.SGD(net.parameters(), lr=0.02) for net in (maker, critic))
    losses = []
    for step, (x, _) in enumerate(DataLoader(samples(), 8, shuffle=True)):
        fake = maker(torch.randn(len(x), 4, dtype=x.dtype))
        mixed = torch.lerp(x, fake.detach(), torch.rand(len(x), 1, dtype=x.dtype)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(fake.detach()).mean() - critic(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        losses.append(loss.item())
        if step % 2:
            of_maker.zero_grad()
            (-critic(maker(torch.randn(len(x), 4, dtype=x.dtype))).mean()).backward()
            of_maker.step()
    return [losses, *state_of(maker, critic)]


@model
def rates_are_searched() -> Any:
    net = classifier()
    rates: list[float] = []
    losses: list[float] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for x, y in DataLoader(samples(), 8, shuffle=True):
        loss = F.cross_entropy(net(x), y)
        if losses and loss.item() > 4 * min(losses):
            break
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 1.5
        rates.append(optimizer.param_groups[0]["lr"])
    return [rates, losses, *state_of(net)]


@model
def saliency_and_features() -> Any:
    net = classifier()
    found = fitted(net)
    kept: list[Tensor] = []
    handle = net[2].register_forward_hook(lambda _module, _args, out: kept.append(out.detach().mean(0)))
    x, y = next(iter(DataLoader(samples(), 9)))
    x.requires_grad_()
    net(x).gather(1, y[:, None]).sum().backward()
    handle.remove()
    assert x.grad is not None
    return [*found, x.grad.clone(), torch.stack(kept)]


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
