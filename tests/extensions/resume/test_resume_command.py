"""``lagom.extensions.resume``: its setting, and the options of the command line."""

from __future__ import annotations

import pytest

from lagom import cli
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig


def test_the_time_between_snapshots_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--snapshot-every", "often", "train.py"])
    assert "argument --snapshot-every: 'often'; want seconds, or auto" in capsys.readouterr().err
    assert TorchDistributedConfig(snapshot_every_s="auto").snapshot_every_s == "auto"
    with pytest.raises(ValueError, match="snapshot_every_s is 'often'; want seconds, more than 0, 'auto', or None"):
        TorchDistributedConfig(snapshot_every_s="often")  # type: ignore[arg-type]


def test_trials_keep_no_snapshots() -> None:
    space = Searchspace(lr=("DOUBLE", [0.1, 1.0]))
    with pytest.raises(ValueError, match=r"snapshot_every_s is 'auto'.*goes on by resume="):
        HyperparameterOptConfig(searchspace=space, num_trials=1, snapshot_every_s="auto")
