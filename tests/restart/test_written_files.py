"""``lagom.restart.written_files``: which files a new attempt finds, wherever the lost one was killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from lagom.cluster import this_host
from lagom.restart import written_files
from lagom.restart.written_files import (
    WrittenFiles,
    beside,
    identity_of,
    prepare_files,
    put_back,
    remove_siblings,
)


def told(written: WrittenFiles, what: str, path: Path, **more: Any) -> None:
    written.take({"what": what, "path": str(path), "host": this_host(), **more})


def writes(written: WrittenFiles, path: Path) -> None:
    """Tell that ``path`` is about to be written, in the state in which it is."""
    told(written, "writes", path, before=identity_of(os.stat(path)) if path.exists() else None)


def test_a_kill_at_any_moment_of_a_write_leaves_the_version_before(tmp_path: Path) -> None:
    path, written = tmp_path / "state", WrittenFiles()
    path.write_text("before")
    writes(written, path)
    prepare_files(written)
    assert path.read_text() == "before"  # it was still there
    old = Path(beside(str(path), written.token, "old"))
    path.rename(old)
    prepare_files(written)
    assert path.read_text() == "before"
    path.rename(old)
    path.write_text("ha")
    prepare_files(written)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_that_was_being_written_is_removed(tmp_path: Path) -> None:
    path, written = tmp_path / "state", WrittenFiles()
    writes(written, path)
    prepare_files(written)
    path.write_text("ha")
    prepare_files(written)
    assert not path.exists()


def test_the_same_path_on_another_host_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not written_files.is_on_shared_disk("/proc/self/status")
    state, rows, written = tmp_path / "state", tmp_path / "rows", WrittenFiles()
    writes(written, state)
    told(written, "appends", rows, begin=2, in_place=False)
    state.write_text("of this host")
    rows.write_text("of this host")
    monkeypatch.setattr(written_files, "this_host", lambda: "another")
    prepare_files(written)
    assert [state.read_text(), rows.read_text()] == ["of this host"] * 2
    monkeypatch.setattr(written_files, "is_on_shared_disk", lambda path: True)
    prepare_files(written)
    assert rows.read_text() == "of"
    assert not state.exists()


@pytest.mark.parametrize("begin", [0, 3])
def test_what_is_cut_off_comes_back_when_there_is_no_other_attempt(tmp_path: Path, begin: int) -> None:
    rows, written = tmp_path / "rows", WrittenFiles()
    rows.write_text("one two")
    rows.chmod(0o640)
    told(written, "appends", rows, begin=begin, in_place=False)
    prepare_files(written)
    assert rows.read_text() == "one two"[:begin]
    assert rows.stat().st_mode & 0o777 == 0o640
    put_back(written)
    remove_siblings(written)
    assert rows.read_text() == "one two"
    assert list(tmp_path.iterdir()) == [rows]


@pytest.mark.parametrize("is_first", [True, False])
def test_rows_that_follow_a_header_are_cut_off_and_the_header_stays(tmp_path: Path, is_first: bool) -> None:
    """The header was written, and the file closed, before the snapshot; or it is a file of the lost attempt alone."""
    rows, written, before = tmp_path / "rows", WrittenFiles(), time.time()
    rows.write_text("header,")
    told(written, "saved", rows, identity=identity_of(rows.stat()), lengths={})
    told(written, "appends", rows, begin=None, in_place=False)
    rows.write_text("header,1,2")
    written.go_back({}, time.time() if is_first else before)
    prepare_files(written)
    assert rows.exists() is is_first
    assert not is_first or rows.read_text() == "header,"
    written.forget_snapshot()
    prepare_files(written)
    assert not rows.exists()
