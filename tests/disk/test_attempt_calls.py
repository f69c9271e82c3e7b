"""``lagom.disk.attempt_calls``: file functions of ranks whose run may begin again after a loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lagom import disk as files
from lagom.restart.written_files import WrittenFiles
from tests.disk.test_file_idioms import found_by_programs, functions_by_keyword, standing_in
from tests.disk.test_rank_disks import tree


def after_a_loss(**facts: Any) -> WrittenFiles:
    """What a new attempt gets to know of a lost one, which made a directory somewhere."""
    return WrittenFiles(made={"/somewhere/else"}, **facts)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("attempt", [1, 2])
def test_functions_take_their_arguments_by_keyword(
    attempt: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, own = found_by_programs(tmp_path / "plain"), found_by_programs(tmp_path / "own")
    expected = standing_in(plain, functions_by_keyword)
    told: list[Any] = []
    written = WrittenFiles() if attempt == 1 else after_a_loss()
    with files.own_disk(str(tmp_path / "run"), rank, 2, 2, written=written, tell=told.append):
        assert standing_in(own, functions_by_keyword) == expected
        assert {path.name for path in own.rglob("*")} == {path.name for path in plain.rglob("*")}
    if rank == 0:
        assert tree(own) == tree(plain)
        renamed = [(note.path, note.details["to"]) for note in told if note.what == "renamed"]
        assert renamed == [
            pair
            for folder in (own, own, own, own / "kept")
            for pair in ((f"{folder}/d/a", f"{folder}/b"), (f"{folder}/b", f"{folder}/d/a"))
        ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by_descriptor", [False, True])
def test_a_lost_attempts_changes_after_the_snapshot_are_made_once_more(
    by_descriptor: bool, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "last").write_text("renamed by the lost attempt")
    monkeypatch.chdir(tmp_path if by_descriptor else folder)
    fd = os.open(folder, os.O_RDONLY) if by_descriptor else None
    gone = {f"{folder}/{name}": 1.0 for name in ("new", "first", "second", "directory")}
    written = after_a_loss(snapshot_at=0.0, gone=gone)
    with files.own_disk(str(tmp_path / "run"), rank, 2, 2, written=written):
        changes: list[Callable[[], None]] = [
            lambda: os.replace(src="new", dst="last", src_dir_fd=fd, dst_dir_fd=fd),
            lambda: os.remove(path="first", dir_fd=fd),
            lambda: os.unlink("second", dir_fd=fd),
            lambda: os.rmdir("directory", dir_fd=fd),
        ]
        for change in changes:
            change()
            with pytest.raises(FileNotFoundError):
                change()
    if fd is not None:
        os.close(fd)
