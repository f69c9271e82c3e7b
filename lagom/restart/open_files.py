"""``OpenFiles``: positions of a process's open files, which a fork shares with it, and what they held."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_OTHERS = ("anon_inode:[pidfd]", "/dev/shm/torch_")
"""Files of processes, and of a loader's batches, which ``check_process`` checks."""
_ENDS = 1 << 16
"""Number of the first and of the last bytes of a growing file that are compared: equal ones count as only grown."""


class NoTwinError(Exception):
    """Says in a few words why a process cannot have a twin."""


@dataclass(frozen=True, slots=True)
class _Position:
    fd: int
    offset: int
    size: int | None
    """Length of a file that is written; None for one that is read."""
    ends: bytes


class OpenFiles:
    """The open files of this process and their positions, as they are now.

    Args:
        known: descriptors that are lagom's own.
        own_folder: folder of lagom's own files; the program's files there are below "files".

    Raises:
        NoTwinError: if a fork of this process could not go on with a file.
    """

    def __init__(self, known: Collection[int], own_folder: str) -> None:
        self._own_folder = os.path.realpath(own_folder) + "/"
        found = [int(name) for name in os.listdir("/proc/self/fd")]
        self._positions = [one for fd in found if fd not in known and (one := self._position(fd)) is not None]

    def have_only_grown(self) -> bool:
        """Return whether each file that the process writes still begins with its content at the time of this object.

        Only the first and the last 64 KB of this content are compared.
        """
        return all(
            one.size is None or (os.fstat(one.fd).st_size >= one.size and _ends(one.fd, one.size) == one.ends)
            for one in self._positions
        )

    def restore(self) -> None:
        """Restore the positions, and cut the files that the process writes to their sizes."""
        for one in self._positions:
            if one.size is not None:
                os.ftruncate(one.fd, one.size)
            os.lseek(one.fd, one.offset, os.SEEK_SET)

    def _position(self, fd: int) -> _Position | None:
        try:
            status = os.fstat(fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the list's own descriptor
            return None
        if path in _DEVICES or path.startswith(_OTHERS) or self._is_ours(path):
            return None
        kind = status.st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise NoTwinError(f"{path} is open")
        flags, offset = fcntl.fcntl(fd, fcntl.F_GETFL), os.lseek(fd, 0, os.SEEK_CUR)
        access = flags & os.O_ACCMODE
        if access == os.O_RDONLY:
            return _Position(fd, offset, None, b"")
        if access == os.O_RDWR or not (flags & os.O_APPEND or offset == status.st_size):
            raise NoTwinError(f"{path} is open to be changed in place")
        return _Position(fd, offset, status.st_size, _ends(fd, status.st_size))

    def _is_ours(self, path: str) -> bool:
        return path.startswith(self._own_folder) and "/files/" not in path[len(self._own_folder) - 1 :]


def _ends(fd: int, size: int) -> bytes:
    """Return first and last bytes before ``size`` of the file open as ``fd``, which need not be open for reading."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        first = os.pread(again, min(size, _ENDS), 0)
        return first + os.pread(again, min(size - len(first), _ENDS), max(len(first), size - _ENDS))
    finally:
        os.close(again)
