"""``lagom.exchange.native``: the compiled part, and page decoding alone, can be switched off; the numbers stay."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.exchange.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="lagom was built without a compiler")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    x = np.arange(64, dtype=np.float64) / 64
    pq.write_table(pa.table({"x": x, "y": np.sin(x)}), tmp_path / "rows.parquet", row_group_size=16)
    return tmp_path


def train(folder: str) -> Any:
    """Train; return the weights, and whether the rank loaded the compiled part."""
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    from lagom.data import ParquetDataset

    for batch in torch.utils.data.DataLoader(ParquetDataset(folder), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch["x"][:, None]), batch["y"][:, None]).backward()
        optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    return weights, native() is not None


def trained(table: Path) -> Any:
    hparams = {"folder": str(table)}
    config = TorchDistributedConfig(launcher="local", world_size=2, batches="split", seed=0, hparams=hparams)
    return experiment.lagom(train, config).per_rank


@pytest.mark.soak  # tests/driver/test_doors.py has one
@pytest.mark.needs("data")
def test_without_the_compiled_part_the_weights_stay_as_they_are(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(table)
    monkeypatch.setenv("LAGOM_NATIVE", "0")
    without = trained(table)
    assert [found[1] for found in whole] == [True] * 2
    assert [found[1] for found in without] == [False] * 2
    for weights, _ in [*whole, *without]:
        assert np.allclose(weights, whole[0][0], rtol=0, atol=1e-12)


@pytest.mark.soak  # make dist and make matrix run lagom on other Pythons
def test_a_compiled_part_for_another_python_is_left_alone_and_named(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("lagom._native")
    assert spec is not None
    assert spec.origin is not None
    package = tmp_path / "lagom"
    shutil.copytree(Path(lagom.__file__).parent, package, ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "train.py").write_text(PROGRAM)
    # The Python below the virtual environment knows no finder of an editable installation.
    command = [str(Path(sys.base_prefix, "bin", "python3")), "train.py"]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}:{sysconfig.get_paths()['purelib']}",
    }
    for suffix, content in (
        (".abi3.so", b"of another machine"),
        (".cpython-39-x86_64-linux-gnu.so", Path(spec.origin).read_bytes()),
    ):
        (package / f"_native{suffix}").write_bytes(content)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reason, weights = done.stdout.splitlines()
    assert reason.startswith("lagom's compiled part cannot be loaded here: ")
    assert weights == "[3.0, 3.0]"
    reason = "lagom's compiled part is for cpython-39-x86_64-linux-gnu, and this Python is cpython-3"
    assert done.stderr.count(reason) == 1, done.stderr


PROGRAM = """
import multiprocessing
from pathlib import Path
import torch
import lagom
from lagom import experiment
from lagom.exchange.native import reason_without_native
from lagom.config import TorchDistributedConfig

def train():
    weight = torch.nn.Parameter(torch.zeros(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(1.0, 7.0)), batch_size=6)
    for (x,) in loader:
        (weight * x.mean() * 6 / 7).sum().backward()
    return float(weight.grad)

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:  # a process remembers what it has found
        print(pool.apply(reason_without_native))
    Path(lagom.__file__).with_name("_native.abi3.so").unlink()
    config = TorchDistributedConfig(launcher="local", world_size=2, batches="split", run_dir=None)
    print([round(value, 4) for value in experiment.lagom(train, config).per_rank])
"""


_ENDS_WITHIN_AN_EXCHANGE = """
import importlib.util, socket, sys, threading, time

spec = importlib.util.spec_from_file_location("lagom._native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
near, far = socket.socketpair()
address = 0
arguments = near.fileno(), near.fileno(), bytes(22), [], [(address, 0, False)], 8, address, 0, 0.5
threading.Thread(target=native.stream, args=arguments, daemon=True).start()


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)  # Python ends meanwhile, and the exchange too


sys.modules["slow"] = Slow()
raise ValueError("the program's own")
"""


def test_a_process_that_ends_within_an_exchange_ends_as_it_would() -> None:
    ended = subprocess.run(
        [sys.executable, "-S", "-c", _ENDS_WITHIN_AN_EXCHANGE, str(native().__file__)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.endswith("ValueError: the program's own\n")
