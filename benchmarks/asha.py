"""Compares ASHA with random search on scikit-learn's digits: the best accuracy after a number of epochs.

    python -m benchmarks.asha [--seeds 5] [--epochs 1200] [--svg docs/asha.svg]

Work is counted in epochs, of all trials together, so that the figure does not depend on the machine. Needs
scikit-learn, whose data set comes with the package.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace

EPOCHS = 27
"""Epochs of a trial that runs to its end."""
SPACE = {
    "lr": ("DOUBLE", [1e-5, 10.0], "log"),
    "decay": ("DOUBLE", [1e-6, 1.0], "log"),
    "momentum": ("DOUBLE", [0.0, 0.999]),
    "units": ("INTEGER", [2, 64]),
    "dropout": ("DOUBLE", [0.0, 0.9]),
}
Curve = list[tuple[int, float]]
"""Points of a curve: the number of epochs of all trials together so far, and the best accuracy of these trials."""


def train(train_set: Any, test_set: Any, hparams: Mapping[str, Any], reporter: Any) -> float:
    """Train a network with one hidden layer; report the test accuracy of each epoch, and return the last."""
    layers = [torch.nn.Linear(64, hparams["units"]), torch.nn.ReLU(), torch.nn.Dropout(hparams["dropout"])]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(hparams["units"], 10))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=hparams["lr"], momentum=hparams["momentum"], weight_decay=hparams["decay"]
    )
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.train()
        for images, digits in DataLoader(train_set, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), digits).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            images, digits = test_set.tensors
            accuracy = (model(images).argmax(1) == digits).float().mean().item()
        reporter.broadcast(accuracy, epoch)
    return accuracy


def main(argv: Sequence[str] | None = None) -> int:
    """Search with all seeds; print a table, and write the plot."""
    args = _arguments(argv)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    train_set, test_set = _digits()
    curves: dict[str, list[Curve]] = {}
    for optimizer in ("random", "asha"):
        for seed in range(args.seeds):
            config = HyperparameterOptConfig(
                searchspace=Searchspace(**SPACE), optimizer=optimizer, es_policy="none", direction="max", seed=seed,
                num_trials=args.epochs // (EPOCHS if optimizer == "random" else 4), launcher="local", run_dir=None,
                train_set=train_set, test_set=test_set,
            )  # fmt: skip
            curves.setdefault(optimizer, []).append(curve(experiment.lagom(train, config).study, args.epochs))
            print(f"{optimizer}, seed {seed}: done", file=sys.stderr)
    marks = [args.epochs * part // 12 for part in range(1, 13)]
    table = {name: [quartiles(found, mark) for mark in marks] for name, found in curves.items()}
    print("epochs  " + "".join(f"{name:>28}" for name in table))
    for row, mark in enumerate(marks):
        print(f"{mark:6}  " + "".join("{:>12.4f} ({:.4f}-{:.4f})".format(*table[name][row]) for name in table))
    if args.svg is not None:
        args.svg.write_text(plot({n: [quartiles(f, e) for e in range(1, args.epochs + 1)] for n, f in curves.items()}))
    return 0


def curve(study: Any, epochs: int) -> Curve:
    """Return a point for each trial of Optuna's ``study`` that has ended, in the order of their ends."""
    found, spent, best = Curve(), 0, 0.0
    for trial in sorted(study.trials, key=lambda one: one.datetime_complete):
        spent += len(trial.intermediate_values)
        best = max(best, *trial.intermediate_values.values())
        found.append((spent, best))
        if spent > epochs:
            break
    return found


def quartiles(curves: Sequence[Curve], epochs: int) -> tuple[float, float, float]:
    """Return median, first and third quartile of the best accuracy after ``epochs``, over the seeds."""
    values = [max((best for spent, best in one if spent <= epochs), default=0.1) for one in curves]
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def plot(found: Mapping[str, Sequence[tuple[float, float, float]]]) -> str:
    """Return an SVG: each method's median after 1, 2, ... epochs as a line, and its quartiles as a band."""
    right, bottom, left, low = 620, 280, 60, 0.80
    colors = {"random": "#888888", "asha": "#2f8fd0"}
    epochs = len(next(iter(found.values())))

    def x(epoch: float) -> float:
        return left + (right - left) * epoch / epochs

    def y(value: float) -> float:
        return 30 + (bottom - 30) * (1 - (max(value, low) - low) / (1 - low))

    parts = ["<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 330' font-family='sans-serif' font-size='12'>"]
    parts.append("<rect width='640' height='330' fill='white'/>")
    parts.append(f"<text x='{left}' y='16'>best accuracy so far: median and quartiles of the seeds</text>")
    for value in (0.80, 0.85, 0.90, 0.95, 1.0):
        parts.append(f"<line x1='{left}' x2='{right}' y1='{y(value):.1f}' y2='{y(value):.1f}' stroke='#dddddd'/>")
        parts.append(f"<text x='{left - 8}' y='{y(value) + 4:.1f}' text-anchor='end'>{value:.2f}</text>")
    for mark in range(0, epochs + 1, epochs // 4):
        parts.append(f"<line x1='{x(mark):.1f}' x2='{x(mark):.1f}' y1='{bottom}' y2='{bottom + 5}' stroke='#888888'/>")
        parts.append(f"<text x='{x(mark):.1f}' y='{bottom + 19}' text-anchor='middle'>{mark}</text>")
    parts.append(f"<text x='{(right + left) / 2}' y='{bottom + 40}' text-anchor='middle'>epochs of all trials</text>")
    for number, (name, values) in enumerate(found.items()):
        lines = [_stairs([(x(1 + at), y(each[part])) for at, each in enumerate(values)]) for part in range(3)]
        band = " ".join([*lines[1], *reversed(lines[2])])
        parts.append(f"<polygon points='{band}' fill='{colors[name]}' opacity='0.25'/>")
        parts.append(f"<polyline points='{' '.join(lines[0])}' fill='none' stroke='{colors[name]}' stroke-width='2'/>")
        at = bottom - 50 + 18 * number
        parts.append(f"<line x1='490' x2='514' y1='{at}' y2='{at}' stroke='{colors[name]}' stroke-width='2'/>")
        parts.append(f"<text x='520' y='{at + 4}'>{name}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _stairs(points: Sequence[tuple[float, float]]) -> list[str]:
    """Return the points of an SVG line in steps, without points between two of the same height."""
    found = [points[0]]
    for point in points[1:]:
        if point[1] != found[-1][1]:
            found += [(point[0], found[-1][1]), point]
    return [f"{x:.1f},{y:.1f}" for x, y in (*found, (points[-1][0], found[-1][1]))]


def _digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    digits = torch.tensor(data.target)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images, digits = images[order], digits[order]
    return TensorDataset(images[:400], digits[:400]), TensorDataset(images[400:], digits[400:])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1200, help="epochs of all trials of a search together")
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
