"""``FileChanges``: a program's changes of files are told of, and lagom's own are not."""

from __future__ import annotations

import io
import os
from pathlib import Path

from lagom.restart.file_changes import FileChanges
from lagom.session.session import Session
from tests.ranks import run_ranks


def test_files_of_lagoms_folder_are_not_the_programs(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "host")

    def write(_: Session) -> list[str]:
        told: list[str] = []
        originals = {"open": os.open, "io.open": io.open, "mkdir": os.mkdir, "readlink": os.readlink}
        changes = FileChanges(str(tmp_path / "linked"))
        calls = changes.noticed({"open": os.open, "io.open": io.open}, lambda: False, originals)
        for folder in ("linked", "host", "."):
            changes.rewrites = lambda folder=folder: told.append(folder)  # type: ignore[misc]
            calls["io.open"](tmp_path / folder / "store", "wb").close()
            os.close(calls["open"](f"{tmp_path}/{folder}/other", os.O_RDWR | os.O_CREAT))
            calls["mkdir"](f"{tmp_path}/{folder}/sub-{folder}")
        return told

    assert run_ranks(1, write) == [[".", ".", "."]]
