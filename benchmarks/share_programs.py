"""The programs of ``benchmarks.share``: ordinary training loops, of about 100 ms a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

Program = tuple[nn.Module, TensorDataset, int, Callable[..., Any]]
"""A model, its data, the size of a batch, and a function that returns the loss of the model and a batch."""
VOCABULARY = 2000


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.project(self.before(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.join(y))
        return x + self.dropout(self.feed(self.between(x)))


class Encoder(nn.Module):
    """Looks whether its mask is all ones, and returns its loss where it gets labels, as Hugging Face's models do."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(depth))

    def forward(self, ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        mask = None
        if not attention_mask.all():
            mask = attention_mask[:, None, None, :].expand(len(ids), 1, ids.shape[1], ids.shape[1]).bool()
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, mask)
        scores = self.head(x)
        if labels is None:
            return {"logits": scores}
        return {"loss": F.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1)), "logits": scores}


class Generator(nn.Module):
    """Returns scores and loss, as nanoGPT does."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.places = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(depth))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        loss = None if targets is None else F.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1))
        return scores, loss


class Denoiser(nn.Module):
    """Draws times and noise, and returns its loss, as lucidrains' diffusion does."""

    def __init__(self, channels: int = 48) -> None:
        super().__init__()
        self.steps: Tensor
        self.register_buffer("steps", torch.linspace(0.999, 0.01, 100).cumprod(0))
        self.enter, self.leave = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        layers = (
            nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(4)
        )
        self.middle = nn.ModuleList(layers)

    def forward(self, images: Tensor) -> Tensor:
        times, noise = torch.randint(0, 100, (len(images),)), torch.randn_like(images)
        scale = self.steps[times][:, None, None, None]
        x = self.enter(scale.sqrt() * images + (1 - scale).sqrt() * noise)
        for layer in self.middle:
            x = x + layer(x)
        loss = F.mse_loss(self.leave(x), noise, reduction="none").flatten(1).mean(1)
        return (loss * (1 + scale.flatten())).mean()


class Residual(nn.Module):
    """A small ResNet with BatchNorm."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.enter, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 10)
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()),
                *(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)),
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A GRU over steps in the first dimension, as d2l has it."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(64, width), nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Any:
        hidden, _ = self.gru(F.one_hot(ids.T, 64).float())
        return self.head(hidden).transpose(0, 1)


class Autoencoder(nn.Module):
    """A variational autoencoder, which returns three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(784, 1200), nn.ReLU(), nn.Linear(1200, 600), nn.ReLU())
        self.mean, self.variance = nn.Linear(600, 32), nn.Linear(600, 32)
        self.leave = nn.Sequential(nn.Linear(32, 600), nn.ReLU(), nn.Linear(600, 1200), nn.ReLU(), nn.Linear(1200, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.enter(x)
        mean, variance = self.mean(x), self.variance(x)
        return self.leave(mean + (variance / 2).exp() * torch.randn_like(mean)), mean, variance


def _text(rows: int, length: int, high: int = VOCABULARY) -> TensorDataset:
    return TensorDataset(torch.randint(1, high, (rows, length)))


def _images(rows: int, size: int) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 3, size, size), torch.randint(0, 10, (rows,)))


def encoder() -> Program:
    """Masked language model; a quarter of the batches has padding."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        if int(ids[0, 0]) % 4 == 0:
            mask[-1, -7:] = 0
        found: Tensor = model(ids, mask, labels=ids)["loss"]
        return found

    return Encoder(), _text(256, 64), 16, loss


def generator() -> Program:
    """Language model with its loss inside."""
    return Generator(), _text(256, 64), 16, lambda model, ids: model(ids[:, :-1].clone(), ids[:, 1:].clone())[1]


def scores() -> Program:
    """Language model with its loss outside."""
    model = Generator()
    return model, _text(256, 64), 16, lambda model, ids: F.cross_entropy(model(ids)[0].flatten(0, 1), ids.flatten())


def denoiser() -> Program:
    """Diffusion with its loss inside."""
    return Denoiser(), _images(256, 24), 16, lambda model, images, _: model(images)


def residual() -> Program:
    """Pictures and BatchNorm."""
    return Residual(), _images(512, 24), 32, lambda model, images, labels: F.cross_entropy(model(images), labels)


def recurrent() -> Program:
    """Time first."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Recurrent(), _text(1024, 40, 64), 64, loss


def autoencoder() -> Program:
    """Variational autoencoder."""

    def loss(model: nn.Module, x: Tensor) -> Any:
        found, mean, variance = model(x)
        divergence = (variance.exp() + mean**2 - 1 - variance).sum(1).mean() / 2
        return F.mse_loss(found, x, reduction="sum") / len(x) + divergence

    return Autoencoder(), TensorDataset(torch.randn(2048, 784)), 256, loss


def table() -> Program:
    """A wide table."""
    model = nn.Sequential(nn.Linear(200, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    data = TensorDataset(torch.randn(4096, 200), torch.randn(4096, 1))
    return model, data, 512, lambda model, x, y: F.mse_loss(model(x), y)


PROGRAMS = {
    one.__name__: one for one in (encoder, generator, scores, denoiser, residual, recurrent, autoencoder, table)
}
