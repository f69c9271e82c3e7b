"""``verify=True`` on Spark: the rehearsals are jobs as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lagom.errors import VerificationError
from tests.integration import programs

ROOT = Path(__file__).parents[2]


@pytest.mark.soak  # tests/extensions/verify/test_rehearsals.py shows it by default
@pytest.mark.parametrize("spark", ["local[2]", "local-cluster"], indirect=True, scope="session")
def test_a_faithful_program_is_rehearsed_and_runs(
    spark: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def train(module: Any, train_set: Any) -> Any:
        print("once")
        weights = programs.train(module, train_set)
        torch.save(weights, "weights.pt")
        return weights

    result = programs.run(train, 2, module=programs.Net, train_set=programs.points(), verify=True, batches="split")
    assert programs.same_weights(result.value, programs.plain_weights())
    out, err = capfd.readouterr()
    assert out == "once\n"
    assert "The ranks do what one process does." in err
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.soak  # tests/extensions/verify/test_rehearsals.py shows it by default
@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_an_unfaithful_program_does_not_run(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def train(module: Any, train_set: Any) -> None:
        model = module()
        for x, y in DataLoader(train_set, batch_size=4):
            (model(x) - y).square().sum().backward()
        Path("ran").touch()

    with pytest.raises(VerificationError, match="needs batches='whole'"):
        programs.run(train, 2, module=programs.Net, train_set=programs.points(), verify=True, batches="split")
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_the_driver_needs_no_torch_to_verify() -> None:
    code = """
import sys
from lagom import experiment
from lagom.config import TorchDistributedConfig

def train():
    import torch
    model = torch.nn.Linear(2, 1)
    for x, in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(9, 2)), batch_size=4):
        model(x).mean().backward()

experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2, verify=True, batches="split"))
print(sorted({"torch", "pyspark"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "[]", done.stderr
    assert "The ranks do what one process does." in done.stderr
