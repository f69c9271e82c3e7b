"""Files that were there before a run: what a lost attempt has changed of them in place stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig
from tests.driver import losses


def change(gate: str) -> list[object]:
    """Change files that are there; return what was found before."""
    found = [Path("count").read_text(), *(os.path.exists(name) for name in ("removed", "old", "new"))]
    with open("count", "r+") as file:
        file.write("1")
    if os.path.exists("removed"):
        os.remove("removed")
        os.rename("old", "new")
    losses.pause_at(f"{gate}-0")
    return found


def test_files_that_were_there_are_as_the_lost_attempt_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("count", "removed", "old"):
        Path(name).write_text("0")
    gate, runs = str(tmp_path / "gate"), tmp_path / "runs"
    config = TorchDistributedConfig(world_size=2, launcher="local", run_dir=runs, hparams={"gate": gate})
    with losses.killed([Path(f"{gate}-0")], losses.kill_rank(1, runs)):
        result = experiment.lagom(change, config)
    assert len(result.failures) == 1
    assert result.value == ["1", False, False, True]
