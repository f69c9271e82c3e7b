"""``OpenFiles``: positions of open files, to which a fork goes back."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lagom.restart.open_files import NoTwinError, OpenFiles

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are listed on Linux")


@contextmanager
def noted(tmp_path: Path, known: list[int]) -> Iterator[OpenFiles]:
    """Yield the positions of what was opened since ``known`` was taken."""
    yield OpenFiles(known, str(tmp_path / "lagom"))


def open_now() -> list[int]:
    names = os.listdir("/proc/self/fd")  # one of them is the list's own, closed by now
    return [int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")]


def test_files_go_back_to_their_position_and_lose_what_was_written_since(tmp_path: Path) -> None:
    path, known = tmp_path / "rows", open_now()
    path.write_text("abcdef")
    with open(path) as read, open(tmp_path / "new", "w") as written, open(path, "a") as appended:
        assert read.read(2) == "ab"
        written.write("one")
        written.flush()
        with noted(tmp_path, known) as positions:
            written.write("two")
            written.flush()
            appended.write("ghi")
            appended.flush()
            os.lseek(read.fileno(), 0, os.SEEK_SET)
            positions.restore()
        written.write("three")
        written.flush()
        assert (tmp_path / "new").read_text() == "onethree"
        assert path.read_text() == "abcdef"
        assert os.lseek(read.fileno(), 0, os.SEEK_CUR) == 6  # Python had read all of it


@pytest.mark.parametrize("how", ["r+", "w+"])
def test_a_file_that_may_be_changed_in_place_is_an_obstacle(how: str, tmp_path: Path) -> None:
    known = open_now()
    (tmp_path / "state").touch()
    with open(tmp_path / "state", how), pytest.raises(NoTwinError, match="state is open to be changed in place"):
        OpenFiles(known, str(tmp_path / "lagom"))


def test_a_file_that_was_written_anew_since_is_noticed(tmp_path: Path) -> None:
    known = open_now()
    with open(tmp_path / "state", "w") as file:
        file.write("one")
        file.flush()
        with noted(tmp_path, known) as positions:
            file.seek(0)
            file.write("two")
            file.flush()
            assert not positions.have_only_grown()


def test_a_socket_is_an_obstacle(tmp_path: Path) -> None:
    known = open_now()
    with socket.socket(), pytest.raises(NoTwinError, match="socket"):
        OpenFiles(known, str(tmp_path / "lagom"))
