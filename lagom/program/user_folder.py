"""``user_folder``: this user's folder for runs in progress. It imports nothing of lagom's, see spark_task.py."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator

_PATIENCE_S = 1.0


def user_folder() -> str:
    """Return the folder in the temporary folder that only this user may enter; make it if it is missing.

    Its name is lagom-UID. If somebody else has taken this name, the folder has a random name behind that; all processes
    of the user find it, since no other user can make a folder of this user.

    Raises:
        OSError: if no folder can be made there.
    """
    top, name = tempfile.gettempdir(), f"lagom-{os.getuid()}"
    path = os.path.join(top, name)
    if _is_own(path):
        return path
    with _locked(top):
        for other in sorted(os.listdir(top)):
            if other.startswith(f"{name}-") and _is_own(os.path.join(top, other)):
                return os.path.join(top, other)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        return path if _is_own(path) else tempfile.mkdtemp(prefix=f"{name}-", dir=top)


def _is_own(path: str) -> bool:
    """Return whether ``path`` is a folder, not a link, that belongs to this user and is closed to others."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


@contextlib.contextmanager
def _locked(top: str) -> Iterator[None]:
    """Keep other processes of lagom from making a folder in ``top``, as far as nobody holds its lock for long."""
    lock = os.open(top, os.O_RDONLY)
    end = time.monotonic() + _PATIENCE_S
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        os.close(lock)
