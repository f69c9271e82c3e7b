"""``add_disk_report``: adds to the error of a full disk the path and the free space of that disk."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
from typing import TYPE_CHECKING

from lagom import disk as files

if TYPE_CHECKING:
    from lagom.session.session import Session

_FULL = 16 << 20
"""A disk with fewer free bytes counts as full."""
_WORDS = ("No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed", "file write failed")


def add_disk_report(session: Session, error: BaseException) -> None:
    """Add to ``error``, if a disk is full, which one; with a single rank, the error stays as it is."""
    if session.world_size == 1 or not _is_of_a_disk(error):
        return
    with contextlib.suppress(Exception):
        text = _describe(session, getattr(error, "filename", None))
        if isinstance(error, OSError) and error.errno is not None:
            error.args = (error.errno, f"{error.strerror}\n{text}\n")
            error.strerror = error.args[1]
        elif len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}\n{text}",)


def _describe(session: Session, named: object) -> str:
    places = {"where it stands": os.getcwd(), "temporary files": tempfile.gettempdir()}
    if isinstance(named, str):
        places = {"this file": os.path.dirname(files.path_to_read(os.path.abspath(named))), **places}
    if not files.writes_for_real():
        places["what this rank writes, until the run has ended"] = str(session.host_dir)
    places["memory that processes share"] = "/dev/shm"
    rooms = {what: _room(path) for what, path in places.items()}
    full = {what: room for what, room in rooms.items() if room[0] < _FULL} or rooms
    lines = [
        f"  {what}: {places[what]}, {room / 1e6:,.0f} MB of {size / 1e6:,.0f} left"
        for what, (room, size) in full.items()
    ]
    remedy = "make room there"
    if not files.writes_for_real():
        remedy += ", or set TMPDIR to a larger disk: only rank 0 writes to the program's own"
    return "\n".join([f"a disk of rank {session.rank} on {socket.gethostname()} is full:", *lines, f"  {remedy}"])


def _is_of_a_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    said = [one for one in error.args if isinstance(one, str)]  # not ``str(error)``, which may run the program's code
    return isinstance(error, Exception) and any(word in one for word in _WORDS for one in said)


def _room(path: str) -> tuple[int, int]:
    """Return the free bytes and the size of the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
