"""Runs on Spark that lose a rank go on from their last snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from tests.snapshots.kills import killed
from tests.snapshots.test_resume import same
from tests.snapshots.training import config, train


@pytest.mark.parametrize("spark", ["local[2]", "standalone"], indirect=True, scope="session")
@pytest.mark.soak_on("standalone")
def test_a_run_goes_on_from_its_snapshot_when_a_rank_is_killed(spark: Any, tmp_path: Path) -> None:
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
    wanted = experiment.lagom(train, config(tmp_path / "whole", launcher="spark", world_size=2)).value
    folder = tmp_path / "lost"
    (folder / "slowly").touch()
    with killed(folder, 1):
        result = experiment.lagom(train, config(folder, launcher="spark", world_size=2, snapshot_every_s=0.1))
    assert same(result.value, wanted)
    assert (folder / "rows.csv").read_text() == (tmp_path / "whole" / "rows.csv").read_text()
    assert "of epoch 2" in result.failures[0]["resumed_from"]
