"""``lagom.disk.settle``: hosts that rank 0 is not on, and their disks."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lagom import disk as files
from lagom.disk import settle
from lagom.disk.stand_ins import write_stand_in
from tests.disk.test_rank_disks import prepared, tree


def on_a_host_without_rank_0(host_dir: Path, folder: Path, program: Callable[[], None]) -> None:
    """``program`` on rank 1 of 2, the only one of its host, to its end."""

    def rank() -> None:
        os.chdir(folder)
        with files.own_disk(str(host_dir), 1, 2, 1):
            program()

    host_dir.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()


def changes() -> None:
    Path("a").write_text("changed")
    shutil.rmtree("old/deep")
    shutil.move("old", "moved")
    os.mkdir("old")
    Path("old", "other").write_text("new")
    os.remove("link")
    os.symlink("moved", "last")
    Path(f"events.{os.getpid()}").write_text("on its own disk, as with one process")
    Path(f"events.{os.getpid()}").unlink()


def test_its_disk_is_as_if_the_program_had_run_there(tmp_path: Path) -> None:
    plain, host = prepared(tmp_path / "plain") / "in", prepared(tmp_path / "host") / "in"
    before = tree(host)
    here = os.getcwd()
    os.chdir(plain)
    changes()
    os.chdir(here)
    on_a_host_without_rank_0(tmp_path / "run", host, changes)
    assert tree(host) == before
    assert settle.settle(tmp_path / "run", [1], [0]) == []
    assert tree(host) == tree(plain)
    assert not (tmp_path / "run" / "disk" / "1").exists()


def test_a_file_system_that_hosts_share_is_left_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = prepared(tmp_path / "host") / "in"
    before = tree(host)

    def program() -> None:
        changes()
        files.asked_for_rank()
        Path("rank1.txt").write_text("on purpose")
        Path("a").write_text("rank 0 has written this as well")

    on_a_host_without_rank_0(tmp_path / "run", host, program)
    monkeypatch.setattr(settle, "is_on_shared_disk", lambda path: True)
    assert settle.settle(tmp_path / "run", [1], [0]) == []
    found = tree(host)
    assert found.pop("rank1.txt") == b"on purpose"
    assert {name: found[name] for name in before} == before


def test_the_first_rank_of_a_host_downloads_for_real(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()

    def program() -> None:
        os.mkdir("data")
        with files.downloading():
            os.makedirs("data/raw")
            Path("data/raw/x").write_text("downloaded")
        Path("data/cache").write_text("its own")
        assert sorted(str(path) for path in Path("data").rglob("*")) == ["data/cache", "data/raw", "data/raw/x"]
        assert Path("data/raw/x").read_text() == "downloaded"

    on_a_host_without_rank_0(tmp_path / "run", host, program)
    downloaded = {"data": None, "data/raw": None, "data/raw/x": b"downloaded"}
    assert tree(host) == downloaded
    assert settle.settle(tmp_path / "run", [1], [0]) == []
    assert tree(host) == downloaded | {"data/cache": b"its own"}


def test_a_stand_in_for_a_file_of_rank_0_is_not_left_on_the_host(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()

    def program() -> None:
        os.mkdir("checkpoint")
        for size in (10_000, 5, 0):
            write_stand_in(f"checkpoint/{size}", size)
            assert os.path.getsize(f"checkpoint/{size}") == size
        Path("checkpoint/own").write_text("its own")

    on_a_host_without_rank_0(tmp_path / "run", host, program)
    assert settle.settle(tmp_path / "run", [1], [0]) == []
    assert tree(host) == {"checkpoint": None, "checkpoint/0": b"", "checkpoint/own": b"its own"}


def test_a_download_stays_in_a_directory_that_the_program_makes_anew(tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "data" / "raw").mkdir(parents=True)
    (host / "data" / "raw" / "old").write_text("removed")

    def program() -> None:
        shutil.rmtree("data")
        os.mkdir("data")
        with files.downloading():
            Path("data/x").write_text("downloaded")
            Path("data/y").write_text("downloaded")
        os.remove("data/y")

    on_a_host_without_rank_0(tmp_path / "run", host, program)
    assert settle.settle(tmp_path / "run", [1], [0]) == []
    assert tree(host) == {"data": None, "data/x": b"downloaded"}


def test_directories_are_listed_by_name_on_all_ranks_of_several_hosts(tmp_path: Path) -> None:
    names = [f"{number:03}" for number in range(100)]
    for name in reversed(names):
        (tmp_path / name).write_text("")

    def listed() -> None:
        assert os.listdir() == names
        assert [entry.name for entry in os.scandir(tmp_path)] == names

    on_a_host_without_rank_0(tmp_path.with_name(tmp_path.name + "-run"), tmp_path, listed)
    with files.own_disk(str(tmp_path.with_name(tmp_path.name + "-other")), 0, 2, 1):
        assert os.listdir(tmp_path) == names
        assert [entry.name for entry in os.scandir(tmp_path)] == names
