"""``lagom.worker.mirror``: a folder that looks like another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lagom.worker import mirror as module
from lagom.worker.mirror import mirror


def test_small_files_are_copies_large_ones_and_environments_links(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "data" / "deep").mkdir(parents=True)
    (source / "data" / "deep" / "a.csv").write_text("1,2")
    (source / "weights.bin").write_bytes(bytes((1 << 20) + 1))
    (source / ".git").mkdir()
    (source / "venv").mkdir()
    (source / "venv" / "pyvenv.cfg").touch()
    mirror(source, target)
    copied = target / "data" / "deep" / "a.csv"
    assert copied.read_text() == "1,2"
    copied.write_text("3")
    assert (source / "data" / "deep" / "a.csv").read_text() == "1,2"
    assert {path.name for path in target.iterdir() if path.is_symlink()} == {"weights.bin", ".git", "venv"}
    assert (target / "weights.bin").stat().st_size == (1 << 20) + 1


def test_what_is_far_away_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ENTRIES", 3)
    source, target = tmp_path / "source", tmp_path / "target"
    for name in "abcd":
        (source / name).mkdir(parents=True)
    mirror(source, target)
    assert [(target / name).is_symlink() for name in "abcd"] == [False, False, True, True]
