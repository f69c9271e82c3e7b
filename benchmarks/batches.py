"""Compares ``batches="whole"`` and ``"split"``: time per training step on 2 ranks of this machine, equal global batch.

    python -m benchmarks.batches [--steps 30] [--rounds 3] [--only PROGRAM]

The settings are: one process with all cores; ``batches="split"``; ``"whole"``; and ``"whole"`` with every forward that
can be split by rows split, even if the exchange costs more time than it saves. The last column is the time of a step in
which samples are loaded. With "whole" each rank loads all samples; if it loaded only its share, 2 ranks could save at
most half of that time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

WORLD_SIZE = 2
SETTINGS = ("one process", "split", "whole", "whole, always sliced")


class LanguageModel(nn.Module):
    """An LSTM with a large vocabulary; the batch is the first dimension."""

    def __init__(self, vocabulary: int = 10_000, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Any:
        """Return scores of shape (batch, time, vocabulary) for tokens of shape (batch, time)."""
        return self.out(self.body(self.embedding(tokens))[0])


class Transformer(nn.Module):
    """A small transformer encoder with a vocabulary of 30,000."""

    def __init__(self, vocabulary: int = 30_000, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Any:
        """Return scores of shape (batch, time, vocabulary) for tokens of shape (batch, time)."""
        return self.out(self.body(self.embedding(tokens)))


class Classifier(nn.Module):
    """A small transformer with dropout, which classifies sequences."""

    def __init__(self, vocabulary: int = 10_000, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Any:
        """Return scores of shape (batch, 10) for tokens of shape (batch, time)."""
        return self.out(self.body(self.embedding(tokens)).mean(1))


def mlp() -> nn.Module:
    """Return a small MLP."""
    return nn.Sequential(nn.Linear(2, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1))


def cnn() -> nn.Module:
    """Return a CNN with BatchNorm and dropout, for images of shape (batch, 3, 32, 32)."""
    layers: list[nn.Module] = []
    for into, out in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def mlp_data() -> TensorDataset:
    """Return random samples of 2 features and 1 target."""
    return TensorDataset(torch.randn(4096, 2), torch.randn(4096, 1))


def cnn_data() -> TensorDataset:
    """Return random images of shape (3, 32, 32) with one of 10 labels."""
    return TensorDataset(torch.randn(2048, 3, 32, 32), torch.randint(10, (2048,)))


def text_data() -> TensorDataset:
    """Return sequences of 32 random tokens; the targets are the same sequences, one token later."""
    tokens = torch.randint(10_000, (512, 33))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def labelled_text_data() -> TensorDataset:
    """Return sequences of 32 random tokens with one of 10 labels."""
    return TensorDataset(torch.randint(10_000, (512, 32)), torch.randint(10, (512,)))


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions."""
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


PROGRAMS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset], Callable[..., Tensor], int]] = {
    "MLP 2-100-100-1": (mlp, mlp_data, F.mse_loss, 64),
    "CNN, BatchNorm, dropout": (cnn, cnn_data, cross_entropy, 64),
    "LSTM, vocabulary of 10000": (LanguageModel, text_data, cross_entropy, 16),
    "transformer, vocabulary of 30000": (Transformer, text_data, cross_entropy, 16),
    "transformer, dropout": (Classifier, labelled_text_data, cross_entropy, 32),
}


def step_seconds(program: str, steps: int, always_slices: bool) -> tuple[float, float]:
    """Train, and return the median seconds of a step and of the loading in a step; runs on each rank."""
    if always_slices:
        from lagom.forward.rows import whole_batch

        whole_batch.ALWAYS = True
    build, data, loss_of, batch_size = PROGRAMS[program]
    torch.manual_seed(0)
    model, loader = build(), DataLoader(data(), batch_size=batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    whole: list[float] = []
    loading: list[float] = []
    while len(whole) < steps + 5:
        batches = iter(loader)
        for _ in range(min(len(loader), steps)):
            start = time.perf_counter()
            x, y = next(batches)
            loaded = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            whole.append(time.perf_counter() - start)
            loading.append(loaded - start)
    return statistics.median(whole[5:]), statistics.median(loading[5:])


def measure(program: str, setting: str, steps: int) -> tuple[float, float]:
    """Run ``program`` with one of ``SETTINGS``; return the seconds of a step and of its loading on rank 0."""
    alone = setting == "one process"
    config = TorchDistributedConfig(
        launcher="local",
        seed=0,
        world_size=1 if alone else WORLD_SIZE,
        batches="whole" if setting.startswith("whole") else "split",
        hparams={"program": program, "steps": steps, "always_slices": setting.endswith("sliced")},
    )
    found: tuple[float, float] = experiment.lagom(step_seconds, config).per_rank[0]
    return found


def report(measured: Mapping[str, Mapping[str, list[tuple[float, float]]]]) -> str:
    """Return a table with the median of the rounds, and the fastest and slowest round."""
    lines = ["| program | setting | ms per step | of rounds | to split | loading |", "|---|---|---|---|---|---|"]
    for program, settings in measured.items():
        split = statistics.median(one[0] for one in settings["split"])
        for setting, rounds in settings.items():
            steps = [one[0] for one in rounds]
            middle, loading = statistics.median(steps), statistics.median(one[1] for one in rounds)
            lines.append(
                f"| {program} | {setting} | {middle * 1e3:.2f} | {min(steps) * 1e3:.2f}-{max(steps) * 1e3:.2f} | "
                f"{middle / split:.2f} | {loading / middle:.0%} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all programs with all settings, and print the table."""
    parser = argparse.ArgumentParser(description="Step times by what the program sees of a batch.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PROGRAMS, help="measure one program")
    args = parser.parse_args(argv)
    measured: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for _ in range(args.rounds):
        for program in [args.only] if args.only else PROGRAMS:
            for setting in SETTINGS:
                rounds = measured.setdefault(program, {}).setdefault(setting, [])
                rounds.append(measure(program, setting, args.steps))
    print(report(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
