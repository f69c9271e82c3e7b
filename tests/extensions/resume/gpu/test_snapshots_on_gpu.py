"""Snapshots with the state of a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest

from lagom import experiment
from tests.extensions.resume import training
from tests.extensions.resume.kills import killed

pytestmark = pytest.mark.gpu


def test_a_killed_rank_goes_on_from_a_snapshot_with_the_state_of_the_gpu(tmp_path: Path) -> None:
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    wanted = experiment.lagom(training.train, training.config(folders[0], world_size=1)).value
    (folders[1] / "slowly").touch()
    with killed(folders[1], 0):
        result = experiment.lagom(training.train, training.config(folders[1], world_size=1, snapshot_every_s=0.1))
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    assert result["device"] == "cuda:0"
    assert result["losses"] == wanted["losses"]
    assert result["weights"] == wanted["weights"]
