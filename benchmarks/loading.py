"""Compares epochs of a program whose loading takes most of the time: one process on one core, 2 ranks on a core each.

    python -m benchmarks.loading [--rounds 5] [--epochs 3] [--workers 2]

The program decodes PNGs of 224x224 in ``__getitem__``, in the workers of a DataLoader, and trains a small CNN on them.
By default 2 ranks share rank 0's workers; in the last setting each rank has its own workers (``share_loading=False``).
Settings take turns; a ratio divides a setting's time by the time of the one process in the same round.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

SETTINGS: Mapping[str, int] = {"one process": 1, "2 ranks": 2, "2 ranks, workers of their own": 2}
"""World size of each setting; each rank has one core."""
SIZE, IMAGES, BATCH_SIZE = 224, 384, 64


class Photos(Dataset[Any]):
    """64 smooth images with some noise, as PNGs in memory; several samples have the same image."""

    def __init__(self) -> None:
        from PIL import Image

        random = np.random.default_rng(0)
        self.files: list[bytes] = []
        for _ in range(64):
            rough = Image.fromarray(random.integers(0, 256, (14, 14, 3), dtype=np.uint8))
            smooth = np.asarray(rough.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.int16)
            noisy = (smooth + random.integers(-4, 5, smooth.shape)).clip(0, 255).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(noisy).save(file, "png")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        pixels = np.asarray(Image.open(io.BytesIO(self.files[index % 64])).convert("RGB"))
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div_(255)
        return image.flip(-1) if torch.rand(()) < 0.5 else image, index % 10


def cnn() -> nn.Module:
    """Return a small CNN for images of shape (batch, 3, 224, 224)."""
    layers: list[nn.Module] = []
    for into, out, stride in ((3, 8, 4), (8, 16, 2), (16, 32, 2)):
        layers += [nn.Conv2d(into, out, 3, stride, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def epoch_seconds(epochs: int, workers: int) -> float:
    """Train, and return the median seconds of an epoch, the first one left out; runs on each rank."""
    torch.manual_seed(0)
    model, loader = cnn(), DataLoader(Photos(), BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    times: list[float] = []
    for _ in range(epochs + 1):
        start = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def run_setting(setting: str, epochs: int, workers: int) -> float:
    """Run the program in ``setting``, with as many cores as ranks; return the seconds of an epoch."""
    world_size = SETTINGS[setting]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:world_size])
    config = TorchDistributedConfig(
        launcher="local",
        seed=0,
        world_size=world_size,
        share_loading=False if setting.endswith("own") else "auto",
        hparams={"epochs": epochs, "workers": workers},
    )
    found: float = max(experiment.lagom(epoch_seconds, config).per_rank)
    return found


def measure(setting: str, epochs: int, workers: int) -> float:
    """Run ``setting`` in a new process, which it limits to some cores; return the seconds of an epoch."""
    command = [sys.executable, "-m", "benchmarks.loading", "--epochs", str(epochs), "--workers", str(workers)]
    run = subprocess.run([*command, "--setting", setting], check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(run.stdout.splitlines()[-1]))


def report(rounds: Mapping[str, Sequence[float]]) -> str:
    """Return a table: the median, fastest and slowest round of each setting, and the ratios to one process."""
    lines = ["| setting | seconds per epoch | times as fast as one process |", "|---|---|---|"]
    one = rounds["one process"]
    for setting, seconds in rounds.items():
        ratios = [alone / mine for alone, mine in zip(one, seconds, strict=True)]
        lines.append(f"| {setting} | {_with_spread(seconds)} | {_with_spread(ratios)} |")
    return "\n".join(lines)


def _with_spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f}-{max(numbers):.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all settings in turns, and print the table."""
    parser = argparse.ArgumentParser(description="Epochs of a program that is bound by its loading.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--setting", choices=SETTINGS, help="run one setting, and print the seconds of an epoch")
    args = parser.parse_args(argv)
    if args.setting:
        print(json.dumps(run_setting(args.setting, args.epochs, args.workers)))
        return 0
    rounds: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(args.rounds):
        for setting in SETTINGS:
            rounds[setting].append(measure(setting, args.epochs, args.workers))
    print(report(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
