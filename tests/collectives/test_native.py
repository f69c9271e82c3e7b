"""``lagom.collectives.native``: the compiled part, and page decoding alone, can be switched off; the numbers stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lagom.collectives.native import native

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(native() is None, reason="lagom was built without a compiler")
PROGRAM = """
import json, sys, torch
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.data import ParquetDataset

def train(folder):
    data = ParquetDataset(folder)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch["x"][:, None]), batch["y"][:, None]).backward()
        optimizer.step()
    from lagom.data.decoders.fast_columns import is_on
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    return weights, "lagom._native" in sys.modules, is_on()

hparams = {"folder": sys.argv[1]}
config = TorchDistributedConfig(launcher="local", world_size=2, batches="split", seed=0, hparams=hparams)
print(json.dumps(experiment.lagom(train, config).per_rank))
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    x = np.arange(64, dtype=np.float64) / 64
    pq.write_table(pa.table({"x": x, "y": np.sin(x)}), tmp_path / "rows.parquet", row_group_size=16)
    return tmp_path


def trained(table: Path, **switches: str) -> Any:
    """Train; return the weights, and whether the rank loaded the compiled part and decodes pages with it."""
    command = [sys.executable, "-c", PROGRAM, str(table)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | switches
    ended = subprocess.run(command, capture_output=True, check=False, timeout=120, env=env, cwd=ROOT, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_each_switch_leaves_the_weights_as_they_are(table: Path) -> None:
    whole = trained(table)
    without_pages = trained(table, LAGOM_PAGE_DECODER="0")
    without = trained(table, LAGOM_NATIVE="0")
    assert [found[1:] for found in whole] == [[True, True]] * 2
    assert [found[1:] for found in without_pages] == [[True, False]] * 2
    assert [found[1:] for found in without] == [[False, False]] * 2
    for weights, *_ in [*whole, *without_pages, *without]:
        assert np.allclose(weights, whole[0][0], rtol=0, atol=1e-12)
