"""Every example runs, with the smallest arguments that still show it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from examples import mnist_data

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TINY = {
    "demo": ["--epochs", "4", "--images", "256", "--threads", "1"],
    "parquet": ["--epochs", "1", "--points", "500"],
    "petastorm": ["--epochs", "1", "--images", "200"],
    "search": ["--trials", "4", "--epochs", "2", "--points", "500"],
    "scalar_field": ["--epochs", "1", "--points", "500"],
    "zero": ["--epochs", "1", "--points", "100"],
}
"""Arguments by example; ``--launcher`` comes on top."""
WITH_SPARK = ("petastorm",)
"""Examples whose data sets a Spark job writes, whatever they are trained on."""


def test_every_example_is_run_here() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("[!_]*.py")) == sorted([*TINY, "mnist_data"])


def test_the_demonstration_draws_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "demo.svg"
    size = ["--epochs", "2", "--images", "1024", "--threads", "1"]
    importlib.import_module("examples.demo").main([*size, "--launcher", "inline", "--picture", str(path)])
    drawn, output = path.read_text(), capsys.readouterr().out
    assert str(path) in output
    CHECKS["demo"](output)
    assert all(drawn.count(f">{name}</text>") == 2 for name in ("1 thread", "1 rank"))
    assert drawn.count("<polyline") == 4


def test_made_images_are_files_in_mnists_format_and_can_be_told_apart(tmp_path: Path) -> None:
    raw = mnist_data.write(tmp_path / "data", num_train=2000, num_test=500)
    # As torchvision names them; magic number, then the shape, in big-endian.
    assert (raw / "train-images-idx3-ubyte").read_bytes()[:16].hex() == "00000803" + "000007d0" + "0000001c" * 2
    assert (raw / "t10k-labels-idx1-ubyte").read_bytes()[:8].hex() == "00000801" + "000001f4"
    train, test = (mnist_data.MNIST(tmp_path / "data", train=part, download=True) for part in (True, False))
    assert (len(train), len(test), sorted(set(test.targets.tolist()))) == (2000, 500, list(range(10)))
    image, label = train[7]
    assert (image.shape, image.dtype, type(label)) == ((1, 28, 28), torch.float32, int)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train.data / 255), train.targets).backward()
        optimizer.step()
    assert (model(test.data / 255).argmax(1) == test.targets).double().mean() > 0.8


def test_made_images_are_equal_for_equal_seeds(tmp_path: Path) -> None:
    folders = [mnist_data.write(tmp_path / name, 50, 20, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    one, same, other = ([path.read_bytes() for path in sorted(folder.iterdir())] for folder in folders)
    assert one == same
    assert one != other
    assert len(one) == 4


AGAIN = (("local", "demo"), ("local", "parquet"), ("local", "scalar_field"), ("local", "search"))
"""Examples in the soak: by default these four run inline only.

tests/driver/test_attempt_files.py, tests/extensions/data/test_ranks.py, test_documents.py and search/test_trial_loop.py
have such programs on ranks by default.
"""


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        pytest.param(launcher, name, marks=pytest.mark.soak if (launcher, name) in AGAIN else ())
        for launcher in ("inline", "local")
        for name in TINY
        if name not in WITH_SPARK
    ],
)
def test_example_runs_and_leaves_nothing(
    name: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    importlib.import_module(f"examples.{name}").main([*TINY[name], "--launcher", launcher])
    CHECKS[name](capsys.readouterr().out)
    assert os.listdir() == []


@pytest.mark.integration
@pytest.mark.soak  # tests/integration/test_scripts.py runs a script so by default
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TINY)
def test_example_runs_on_spark_from_an_environment_that_is_not_activated(name: str, tmp_path: Path) -> None:
    path, folder = tmp_path / "bin", tmp_path / "folder"
    path.mkdir()
    folder.mkdir()
    (path / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3"))  # which has no packages
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *TINY[name], "--launcher", "spark"]
    env = {key: value for key, value in os.environ.items() if key != "PYSPARK_PYTHON"}
    env |= {"PYTHONPATH": str(ROOT), "PATH": f"{path}{os.pathsep}{env['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert any(words in done.stdout for words in ("world size 2", "best of 4 trials", "lagom, 2 ranks"))
    CHECKS[name](done.stdout)
    assert os.listdir(folder) == []


@pytest.mark.integration
@pytest.mark.soak
@pytest.mark.latency
@pytest.mark.timeout(300)
def test_the_demonstration_ends_within_a_minute_and_gains_by_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert time.monotonic() - start < 60
    assert done.returncode == 0, done.stderr
    _the_demonstration_is_true(done.stdout)
    speeds = re.search(r"^speed +1.00 x(?: +[\d.]+ x)? +([\d.]+) x +([\d.]+) x$", done.stdout, flags=re.MULTILINE)
    assert speeds is not None
    assert all(float(speed) > 1 for speed in speeds.groups())


def _lagom_learns_as_plainly(output: str) -> None:
    plain, lagom = (float(loss) for loss in re.findall(r": +test loss ([\d.]+) in", output))
    assert lagom == pytest.approx(plain, rel=1e-4)


def _levels_save_and_agree(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+);", output)]
    held = [[float(one) for one in line.split(" and ")] for line in re.findall(r"hold ([\d. and]+) MB", output)]
    assert len(losses) == len(held) > 1
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    if len(held[0]) > 1:
        assert all(max(more) < 0.9 * min(less) for less, more in pairwise(held))


def _the_demonstration_is_true(output: str) -> None:
    rows = {name: line.split() for line in output.splitlines() for name in _ROWS if line.startswith(name)}
    losses = [float(loss) for loss in rows["loss of the last step"][5:]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    assert max(map(float, rows["weights differ at most by"][5:])) < 1e-4
    assert all(float(seconds) > 0 for seconds in rows["an epoch, once warm"][4::2])
    if "one killed" in output:
        assert "Rank 1 was killed: the run went on from digits.pt" in output
    assert output.count("  epoch 1: ") == len(losses)


_ROWS = ("loss of the last step", "weights differ at most by", "an epoch, once warm")
CHECKS = dict.fromkeys(TINY, _lagom_learns_as_plainly) | {
    "demo": _the_demonstration_is_true,
    "zero": _levels_save_and_agree,
}
