"""``Retention``: the default folder does not grow without end, and nothing is removed that is somebody's."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lagom.watch.retention import Retention
from lagom.watch.run_dir import RunRecords, records


def made(home: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecords:
    monkeypatch.setenv("HOME", str(home))
    found = records("~/.lagom/runs", True, {"name": "a run"})
    assert found is not None
    return found


def old(top: Path, number: int, size: int = 10) -> Path:
    folder = top / f"20200101-0000{number:02}-train-00000{number}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "rank-0.log").write_bytes(b"x" * size)
    return folder


def test_the_last_runs_are_kept_and_those_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_KEEP_RUNS", "3")
    numbers = itertools.count()
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"{next(numbers):06}")  # in order within a second
    top = tmp_path / ".lagom" / "runs"
    before = [old(top, number) for number in range(4)]
    going_on = made(tmp_path, monkeypatch)
    others = [made(tmp_path, monkeypatch) for _ in range(4)]
    for one in others:
        one.close()
    assert not any(folder.exists() for folder in before)
    assert going_on.folder.exists()
    assert sum(one.folder.exists() for one in others) >= 2
    assert len(list(top.iterdir())) <= 4
    going_on.close()  # which leaves itself
    made(tmp_path, monkeypatch).close()
    assert len(list(top.iterdir())) == 3
    assert not going_on.folder.exists()


@pytest.mark.parametrize(
    ("files", "stays"),
    [
        (
            ["snapshots/call", "snapshots/settings", "snapshots/.lock", "snapshots/files.jsonl", "snapshots/result"],
            False,
        ),
        (["timelines/rank-0.jsonl", "timelines-lost-1/rank-0.jsonl", "timelines-lost-2/rank-1.jsonl"], False),
        (["snapshots/call", "snapshots/settings"], True),
        (["snapshots/call", "snapshots/result", "snapshots/snapshot-000001.state"], True),
        (["snapshots/result", "snapshots/mine.pt"], True),
        (["trials/0.pt"], True),
    ],
)
def test_runs_that_can_go_on_and_files_of_the_user_stay(files: list[str], stays: bool, tmp_path: Path) -> None:
    folder = old(tmp_path, 0)
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()
    old(tmp_path, 1)
    Retention(num_mb=0).remove_older(tmp_path)
    assert folder.exists() == stays


def test_older_runs_go_when_there_are_too_many_bytes(tmp_path: Path) -> None:
    folders = [old(tmp_path, number, 400_000) for number in range(5)]
    Retention(num_mb=1).remove_older(tmp_path)
    assert [folder.exists() for folder in folders] == [False, False, True, True, True]  # the newest does not count
    Retention(num_mb=0.1).remove_older(tmp_path)  # the newest, whatever its size
    assert [folder.exists() for folder in folders] == [False, False, False, False, True]


def test_nothing_is_removed_that_lagom_has_not_made(tmp_path: Path) -> None:
    with_notes = old(tmp_path, 0)
    (with_notes / "my notes.txt").write_text("mine")
    other = tmp_path / "20200101-000000-thesis"
    other.mkdir()
    elsewhere = old(tmp_path / "elsewhere", 1)
    linked = tmp_path / elsewhere.name
    linked.symlink_to(elsewhere)
    newest = old(tmp_path, 2)
    Retention(num_runs=0).remove_older(tmp_path)
    assert all(folder.exists() for folder in (with_notes, other, elsewhere, linked, newest))


def test_a_hidden_file_or_a_folder_of_the_users_keeps_a_run(tmp_path: Path) -> None:
    with_settings, with_environment, with_folder, with_more, plain, newest = (old(tmp_path, n) for n in range(6))
    (with_settings / ".env").write_text("mine")
    (with_environment / ".venv").mkdir()
    (with_environment / ".venv" / ".x").write_text("mine")
    (with_folder / "report.html").mkdir()
    for folder, name in ((with_more, "result.json"), (plain, "rank-0.jsonl"), (plain, "rank-11.jsonl")):
        (folder / "timelines").mkdir(exist_ok=True)
        (folder / "timelines" / name).write_text("{}")
    for name in (".alive", ".run.json", ".result.json"):
        (plain / name).write_text("{}")
    Retention(num_runs=0).remove_older(tmp_path)
    assert all(folder.exists() for folder in (with_settings, with_environment, with_folder, with_more, newest))
    assert not plain.exists()


def test_a_large_run_does_not_remove_those_around_it(tmp_path: Path) -> None:
    folders = [old(tmp_path, number, size) for number, size in enumerate((400_000, 400_000, 3_000_000, 3_000_000))]
    Retention(num_mb=1).remove_older(tmp_path)
    assert [folder.exists() for folder in folders] == [True, True, False, True]


def test_files_that_another_process_removes_meanwhile_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [old(tmp_path, number) for number in range(4)]
    original = os.scandir

    @contextmanager
    def scandir(path: int | Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with original(path) as entries:
            listed = list(entries)
        if path == folders[1]:
            (folders[1] / "rank-0.log").unlink()
        yield iter(listed)

    monkeypatch.setattr(os, "scandir", scandir)
    Retention(num_runs=1).remove_older(tmp_path)
    monkeypatch.undo()
    assert [folder.exists() for folder in folders] == [False, True, False, True]  # the next run removes it
    Retention(num_runs=1).remove_older(tmp_path)
    assert [folder.exists() for folder in folders] == [False, False, False, True]


def test_a_folder_that_was_asked_for_keeps_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_KEEP_RUNS", "1")
    for _ in range(3):
        found = records(tmp_path, False, {"name": "a run"})
        assert found is not None
        found.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_limit_that_is_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_KEEP_MB", "half a gigabyte")
    with pytest.raises(ValueError, match="LAGOM_KEEP_MB is 'half a gigabyte'; want a number"):
        made(tmp_path, monkeypatch)
