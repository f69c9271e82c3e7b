"""Snapshots of several ranks on disk: one is complete when all shards are there, and damaged if one is not whole."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lagom.errors import LagomError
from lagom.extensions.resume.snapshot_files import SnapshotFiles
from lagom.program.payload import Parcel
from lagom.restart.kept_snapshots import Snapshot, SnapshotFolder, SnapshotPlace
from tests.damage import KINDS, damage
from tests.extensions.resume.test_snapshot_files import FACTS, files

VERSION = "step 3"


@pytest.fixture
def folder(tmp_path: Path) -> SnapshotFolder:
    folder = SnapshotFolder(str(tmp_path / "snapshots"))
    folder.make()
    Path(folder.call).touch()
    return folder


def nothing() -> None:
    raise AssertionError("all shards are there")


def write(rank_files: SnapshotFiles, number: int, wait: Callable[[], Any]) -> None:
    rank_files.write(number, Parcel([number, b"state" * 100]), FACTS, wait)


def write_shards(rank_files: SnapshotFiles, number: int, rank: int, version: str = VERSION) -> None:
    rank_files.write_part(number, rank, Parcel([rank, b"shard" * 100]), version)


def add(folder: SnapshotFolder, tmp_path: Path, number: int) -> None:
    """Write snapshot ``number`` of two ranks."""
    ranks = files(SnapshotPlace(folder), tmp_path)
    for rank in (0, 1):
        write_shards(ranks, number, rank)
    write(ranks, number, lambda: ranks.wait_for_parts(number, 2, VERSION, nothing))


def test_a_snapshot_is_complete_when_all_ranks_have_written_shards(folder: SnapshotFolder, tmp_path: Path) -> None:
    ranks = files(SnapshotPlace(folder), tmp_path)
    write_shards(ranks, 1, 0)
    seen: list[Snapshot | None] = []

    def pause() -> None:
        seen.append(folder.newest())
        if len(seen) == 3:
            write_shards(ranks, 1, 1)

    write(ranks, 1, lambda: ranks.wait_for_parts(1, 2, VERSION, pause))
    assert seen == [None] * 3
    assert (snapshot := folder.newest_whole(lambda _: None)) is not None
    assert sorted(snapshot.names) == sorted(name for name in os.listdir(folder.path) if name.startswith("snapshot"))
    assert [len(os.listdir(folder.path)), len(snapshot.parts)] == [5, 2], "a partial file is left"


def test_shards_of_another_step_and_shards_that_could_not_be_written_make_no_snapshot(
    folder: SnapshotFolder, tmp_path: Path
) -> None:
    ranks = files(SnapshotPlace(folder), tmp_path)
    for rank, version in ((0, VERSION), (1, "step 4")):
        write_shards(ranks, 1, rank, version)
    with pytest.raises(LagomError, match="the shards of rank 1 belong to another step"):
        write(ranks, 1, lambda: ranks.wait_for_parts(1, 2, VERSION, nothing))
    ranks.note_part(1, 1, {"why": "No space left on device"})
    with pytest.raises(LagomError, match="rank 1 could not write its shards: No space left on device"):
        write(ranks, 1, lambda: ranks.wait_for_parts(1, 2, VERSION, nothing))
    assert folder.newest() is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_with_damaged_shards_is_left_out(kind: str, folder: SnapshotFolder, tmp_path: Path) -> None:
    for number in (1, 2):
        add(folder, tmp_path, number)
    path = Path(folder.path) / "snapshot-000002.part-1"
    damage(path, kind, random.Random(1))
    if kind in ("cut", "empty", "doubled", "missing"):
        assert (newest := folder.newest()) is not None
        assert newest.number == 1, "the size is seen without the bytes"
    said: list[str] = []
    found = folder.newest_whole(said.append)
    assert found is not None
    assert found.number == 1
    assert [line.startswith("snapshot 2 is damaged, and left out: ") for line in said] == [True]


def test_only_the_shards_of_the_last_two_snapshots_are_kept(folder: SnapshotFolder, tmp_path: Path) -> None:
    for number in range(1, 5):
        add(folder, tmp_path, number)
    parts = sorted(name for name in os.listdir(folder.path) if ".part-" in name)
    assert parts == [f"snapshot-00000{number}.part-{rank}" for number in (3, 4) for rank in (0, 1)]
