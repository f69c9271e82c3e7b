"""Trains one function four times, compares the runs in a table, and draws them: the demonstration of ``make demo``.

python -m examples.demo                       # one process, then 2 ranks on Spark local[2], then a rank is killed
python -m examples.demo --launcher local      # 2 processes of this machine, no Spark

The function reads images of digits row by row with a recurrent network. Its steps are many and small, so torch's own
threads do not make them faster, and ranks that share out the images do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.mnist_data import digits
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.watch.chart import line_chart

_BATCH = 256
_WINDOW = 2
"""Steps for each point of the curve of the speed."""
_CLASSES = Path(sys.prefix, "spark.jsa")
"""Archive of Spark's classes (class data sharing), which ``make`` has written so that the JVM starts faster."""


def main(argv: Sequence[str] | None = None) -> None:
    """Call ``train`` plainly with one thread and with several, through lagom, and through lagom with a killed rank."""
    args = _arguments(argv)
    load = os.getloadavg()[0]
    runs, lost = compare(args)
    print(table(runs))
    if load > (os.cpu_count() or 1) / 2:
        print(f"\nThis machine was busy when the demo began (load {load:.1f}): run it again for times that say more.")
    for loss in lost:
        print(
            f"\nRank {loss['rank']} was killed: the run went on from {Path(loss['resumed_from']).name}, and lost "
            f"{loss['seconds_lost']:.2f} s. Nothing was printed twice."
        )
    if args.picture is not None:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        args.picture.write_text(picture(runs))
        print(f"\nLoss and speed as a picture: {args.picture}")
    print(_NEXT)


def compare(args: argparse.Namespace) -> tuple[dict[str, Run], list[dict[str, Any]]]:
    """Return the runs by their titles, and the failures of the run that lost a rank."""
    train_set, test_set = _images(args.images, seed=0), _images(args.images // 4, seed=1)
    hparams = {"epochs": args.epochs, "threads": 1}
    runs: dict[str, Run] = {}
    lost: list[dict[str, Any]] = []

    def measure(title: str, call: Callable[[], float]) -> None:
        print(f"{title}:", flush=True)
        before = torch.get_num_threads()
        with _own_folder():
            torch.manual_seed(0)
            called_at = time.time()
            runs[title] = Run.read(call(), called_at)
        torch.set_num_threads(before)

    def plainly(threads: int) -> float:
        return train(Reader, {**hparams, "threads": threads}, train_set, test_set)

    def through_lagom(**fields: Any) -> float:
        result = experiment.lagom(train, replace(config, **fields))
        lost.extend(result.failures)
        accuracy: float = result["test result"]
        return accuracy

    place = {"world_size": args.world_size, "launcher": args.launcher}
    config = TorchDistributedConfig(module=Reader, hparams=hparams, train_set=train_set, test_set=test_set, **place)
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    measure("1 process, 1 thread", lambda: plainly(1))
    if args.threads > 1:
        measure(f"1 process, {args.threads} threads", lambda: plainly(args.threads))
    with _spark(args.world_size) if args.launcher == "spark" else contextlib.nullcontext():
        measure(f"lagom, {ranks}", through_lagom)
        if args.world_size > 1:
            with tempfile.TemporaryDirectory() as folder, _killing(1, Path(folder)):
                measure(f"{ranks}, one killed", lambda: through_lagom(run_dir=folder))
    return runs, lost


class Reader(torch.nn.Module):
    """Reads the rows of an image, and says which digit it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.GRU(28, 128, batch_first=True)
        self.digit = torch.nn.Linear(28 * 128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a score for each digit, of shape (B, 10), for images of shape (B, 28, 28)."""
        states, _ = self.rows(images)
        scores: torch.Tensor = self.digit(states.flatten(1))
        return scores


def train(
    module: Callable[[], torch.nn.Module], hparams: Mapping[str, Any], train_set: TensorDataset, test_set: TensorDataset
) -> float:
    """Train with an ordinary loop for one process, from its checkpoint if there is one; return the accuracy."""
    torch.set_num_threads(hparams["threads"])
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    epoch, steps = 0, []
    if os.path.exists("digits.pt"):
        saved = torch.load("digits.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        epoch, steps = saved["epoch"], saved["steps"]

    while epoch < hparams["epochs"]:
        for images, labels in DataLoader(train_set, batch_size=_BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            steps.append((time.time(), loss.item()))
        epoch += 1
        print(f"  epoch {epoch}: loss {loss.item():.6f}")
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save({**states, "epoch": epoch, "steps": steps}, "digits.pt")

    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test_set, batch_size=_BATCH))
    return right / len(test_set)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Measurements of one call of ``train``, read from the checkpoint that it wrote."""

    accuracy: float
    called_at: float
    """Time when ``train`` was called."""
    steps: Sequence[tuple[float, float]]
    """Time and loss of each step."""
    epochs: int
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, accuracy: float, called_at: float) -> Run:
        """Return the run whose checkpoint is in the working directory."""
        saved = torch.load("digits.pt")
        steps, epochs = saved["steps"], saved["epoch"]
        return cls(accuracy=accuracy, called_at=called_at, steps=steps, epochs=epochs, weights=saved["model"])

    @property
    def launch_s(self) -> float:
        """Seconds from the call to the end of the first step."""
        return self.steps[0][0] - self.called_at

    @property
    def epoch_s(self) -> float:
        """Seconds of the fastest epoch, without the first one."""
        per_epoch = len(self.steps) // self.epochs
        ends = [at for at, _ in self.steps[per_epoch - 1 :: per_epoch]]
        return min((end - begin for begin, end in pairwise(ends)), default=float("nan"))

    def difference(self, other: Run) -> float:
        """Return the largest absolute difference between a weight of this run and the same weight of ``other``."""
        return max(float((own - other.weights[name]).abs().max()) for name, own in self.weights.items())


def table(runs: Mapping[str, Run]) -> str:
    """Return the runs side by side, compared with the first."""
    plain = next(iter(runs.values()))
    rows = {
        "": list(runs),
        "call to first step": [f"{run.launch_s:.2f} s" for run in runs.values()],
        "an epoch, once warm": [f"{run.epoch_s:.2f} s" for run in runs.values()],
        "speed": [f"{plain.epoch_s / run.epoch_s:.2f} x" for run in runs.values()],
        "loss of the last step": [f"{run.steps[-1][1]:.7f}" for run in runs.values()],
        "digits read correctly": [f"{run.accuracy:.2%}" for run in runs.values()],
        "weights differ at most by": [f"{run.difference(plain):.1g}" for run in runs.values()],
        "lines of train() changed": ["0"] * len(runs),
    }
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    lines = [
        f"{name:26}" + "".join(f"  {text:>{width}}" for text, width in zip(texts, widths, strict=True))
        for name, texts in rows.items()
    ]
    return "\n" + "\n".join(lines)


def picture(runs: Mapping[str, Run]) -> str:
    """Return an SVG of the loss over time, and of the images per second."""
    losses, speeds = {}, {}
    for title, run in runs.items():
        name, begin = title.rpartition(", ")[2], run.steps[0][0]
        losses[name] = [(at - begin, loss) for at, loss in run.steps]
        ends = [at - begin for at, _ in run.steps[::_WINDOW]]
        speeds[name] = [(end, _WINDOW * _BATCH / (end - start)) for start, end in pairwise(ends)]
    charts = (
        line_chart("Loss", losses, dashed=False),
        line_chart("Images per second", speeds, from_zero=True, dashed=False),
    )
    placed = "".join(
        chart.replace("<svg ", f'<svg x="{520 * at}" width="500" height="230" ', 1) for at, chart in enumerate(charts)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -10 1040 250" color="#222">'
        f'<rect x="-10" y="-10" width="1040" height="250" fill="#fff"/>{placed}</svg>\n'
    )


def _images(num: int, seed: int) -> TensorDataset:
    images, labels = digits(num, np.random.default_rng(seed))
    return TensorDataset(torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long())


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Work in a new folder, which is removed afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _killing(rank: int, run_dir: Path) -> Iterator[None]:
    """Kill ``rank`` of the run that is recorded in ``run_dir`` when it has saved its first checkpoint."""
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.02):
            records = list(run_dir.glob("*/run.json"))
            if records and zipfile.is_zipfile("digits.pt"):  # a checkpoint is a zip file once it is complete
                ended.wait(0.05)
                with contextlib.suppress(ProcessLookupError):  # the run has just ended
                    os.kill(json.loads(records[0].read_text())["ranks"][str(rank)]["pid"], signal.SIGKILL)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _spark(slots: int) -> Iterator[None]:
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        yield
        return
    builder = SparkSession.builder.master(f"local[{slots}]").config("spark.ui.enabled", False)
    # The JVM lives only for seconds: to optimise code and to parse classes would take longer than it saves.
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    if _CLASSES.exists():
        options += f" -Xlog:disable -XX:SharedArchiveFile={_CLASSES}"
    builder = builder.config("spark.driver.extraJavaOptions", options)
    session = builder.config("spark.ui.showConsoleProgress", False).config("spark.log.level", "ERROR").getOrCreate()
    try:
        yield
    finally:
        session.stop()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2048, help="training images; a quarter as many are for the test")
    parser.add_argument("--world-size", type=int, help="number of ranks; 2, and 1 inline")
    parser.add_argument("--launcher", choices=["spark", "local", "inline"], default="spark")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the second plain call; 1 leaves it out")
    parser.add_argument("--picture", type=Path, help="write an SVG of loss and speed here")
    args = parser.parse_args(argv)
    if args.world_size is None:
        args.world_size = 1 if args.launcher == "inline" else 2
    return args


_NEXT = """
What would come next:
  lagom run -n 2 your_script.py            your own program, unchanged, on this machine
  lagom doctor --master spark://host:7077  whether a cluster is ready
  experiment.lagom(train, config)          the same from a notebook; result.report() makes a page of the run"""


if __name__ == "__main__":
    main()
