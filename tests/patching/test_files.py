"""``lagom.patching.files``: saves by one writer, downloads once per host."""

from __future__ import annotations

import os
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lagom.patching import files
from lagom.patching.session import Session
from tests.ranks import run_ranks


def test_a_path_is_written_once_and_read_by_all(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run(session: Session) -> Any:
        values = []
        for number in range(3):
            if session.local_rank == 0:
                time.sleep(0.05)
            torch.save({"number": number, "by": session.rank}, path)
            values.append(torch.load(path))
            assert session.group is not None
            session.group.barrier()
        buffer = tmp_path / f"own{session.rank}"
        with open(buffer, "wb") as file:
            torch.save(session.rank, file)
        return values, torch.load(buffer)

    expected = [{"number": number, "by": 0} for number in range(3)]
    assert run_ranks(2, run) == [(expected, 0), (expected, 1)]
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "own0", "own1"]


def test_a_failed_save_raises_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run(session: Session) -> Any:
        torch.save(1, path)
        if session.rank == 0:
            with pytest.raises(AttributeError, match="local object"):
                torch.save(lambda: 0, path)
        else:
            torch.save(lambda: 0, path)
        return torch.load(path)

    assert run_ranks(2, run) == [1, 1]
    assert os.listdir(tmp_path) == ["model.pt"]


def test_the_file_is_there_for_every_rank_when_its_save_returns(tmp_path: Path) -> None:
    def run(session: Session) -> bool:
        if session.rank == 0:
            time.sleep(0.2)
        torch.save(torch.zeros(1000), tmp_path / "last.pt")
        return (tmp_path / "last.pt").exists()

    assert run_ranks(3, run) == [True, True, True]


def test_paths_of_a_ranks_own_are_written_by_that_rank() -> None:
    def run(session: Session) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"best-{session.rank}.pt")
            torch.save(session.rank, path)
            return torch.load(path)

    began = time.monotonic()
    assert run_ranks(2, run) == [0, 1]
    assert time.monotonic() - began < files._MEET_S


def test_a_rank_that_saves_alone_writes_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MEET_S", 0.1)

    def run(session: Session) -> Any:
        if session.rank == 1:
            torch.save(2, tmp_path / "a")
            return torch.load(tmp_path / "a")
        return None

    assert run_ranks(2, run) == [None, 2]


class Downloaded(Dataset[int]):
    def __init__(self, root: Path, download: bool = False) -> None:
        self.fetched = False
        if download and not (root / "data").exists():
            time.sleep(0.1)
            assert not (root / "data").exists()
            (root / "data").write_text("x")
            self.fetched = True


def test_a_data_set_is_downloaded_by_one_rank(tmp_path: Path) -> None:
    def run(_: Session) -> Any:
        class Later(Downloaded):
            def __init__(self, root: Path, **options: Any) -> None:
                super().__init__(root, **options)

        (tmp_path / "later").mkdir(exist_ok=True)
        Downloaded(tmp_path)
        return Downloaded(tmp_path, download=True).fetched, Later(tmp_path / "later", download=True).fetched

    found = run_ranks(3, run)
    assert sorted(first for first, _ in found) == [False, False, True]
    assert sorted(second for _, second in found) == [False, False, True]


def test_a_url_is_retrieved_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("content")

    def run(_: Session) -> Any:
        name, headers = urllib.request.urlretrieve(source.as_uri(), tmp_path / "copy")
        written = os.stat(name).st_mtime_ns
        time.sleep(0.1)
        return str(name), headers["Content-length"], written == os.stat(name).st_mtime_ns

    assert run_ranks(2, run) == [(str(tmp_path / "copy"), "7", True)] * 2
