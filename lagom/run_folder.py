"""``RunFolder``: the folder of a run, opened once, so that it stays the same one whatever its path leads to later.

Note [Folders of runs] is at the end.
"""

from __future__ import annotations

import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lagom.cluster import this_host
from lagom.errors import LagomError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class FolderReference:
    """Names an open folder for other processes, which may run on other hosts that share it."""

    path: str
    pinned: str
    """Path by which other processes of this user on the same host find the folder, wherever it is now."""
    host: str
    device: int
    inode: int

    def open(self) -> RunFolder:
        """Open the folder.

        Raises:
            OSError: if this host has no such folder, or, on the host of the reference, another one at its path.
        """
        is_here = this_host() == self.host
        for place in (self.pinned, self.path) if is_here else (self.path,):
            with suppress(OSError):
                folder = RunFolder(self.path, place)
                status = os.fstat(folder.fd)
                if not is_here or (status.st_dev, status.st_ino) == (self.device, self.inode):
                    return folder
                folder.close()
        raise FileNotFoundError(f"{self.path} is not there, or is another folder than when the run began")


class RunFolder:
    """A folder that is reached by its descriptor.

    Args:
        path: path of the folder.
        place: path by which to open it, which must not end in a link; None: ``path``.

    Raises:
        OSError: if there is no such folder.
    """

    def __init__(self, path: str | os.PathLike[str], place: str | None = None) -> None:
        self.path = Path(path)
        """Path of the folder when it was opened, for messages and for other processes."""
        self._pid = os.getpid()
        self.fd = os.open(place or self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._closed = weakref.finalize(self, _close, self.fd, self._pid)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open the folder that ``path`` leads to, also by links; whose it is, is not looked at.

        Raises:
            OSError: if there is no such folder.
        """
        return cls(os.path.realpath(path))

    @classmethod
    def open_own(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open the folder that ``path`` leads to, for this process to act on what is in it.

        Raises:
            OSError: if there is no such folder.
            LagomError: if another user can have written to it.
        """
        folder = cls.open(path)
        folder.check_own()
        return folder

    @classmethod
    def make(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Make a new folder for this user alone, and the folders around it if they are missing.

        Raises:
            OSError: if it cannot be made, or another process has put another folder in its place.
        """
        Path(path).mkdir(mode=0o700, parents=True)
        folder = cls(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)))
        with folder.replacing(name := ".new") as fd:
            # Some network file systems name one owner for all files: so two new ones are compared, not with the user.
            is_new = os.fstat(fd).st_uid == os.fstat(folder.fd).st_uid and len(folder.names()) == 1
        folder.remove(name)
        if not is_new:
            raise FileExistsError(f"{path} was exchanged for another folder while it was made")
        return folder

    def reference(self) -> FolderReference:
        """Return a name of this folder for other processes; it can be pickled."""
        found, pinned = os.fstat(self.fd), f"/proc/{os.getpid()}/fd/{self.fd}/."
        return FolderReference(str(self.path), pinned, this_host(), found.st_dev, found.st_ino)

    def close(self) -> None:
        """Close the descriptor."""
        self._closed()

    @property
    def is_of_this_process(self) -> bool:
        """Return whether this process has opened it; a fork may have closed the descriptor."""
        return self._pid == os.getpid()

    @property
    def is_own(self) -> bool:
        """Return whether only this user can have written to the folder itself."""
        return _is_own(os.fstat(self.fd))

    def check_own(self) -> None:
        """Check that no other user can have written to the folder.

        Raises:
            LagomError: if another user can have.
        """
        if not self.is_own:
            raise LagomError(_not_own(self.path))

    def is_in_place(self) -> bool:
        """Return whether the folder's path still leads to this folder."""
        with suppress(OSError):
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        return False

    def subfolder(self, name: str, *, make: bool = False) -> RunFolder:
        """Return the folder ``name`` in this one, which must not be a link; ``make`` it for this user alone.

        Raises:
            OSError: if there is no such folder, or with ``make``, if there is one.
        """
        if make:
            os.mkdir(self.at(name), 0o700)
        return RunFolder(self.path / name, str(self.at(name)))

    def at(self, name: str = "") -> Path:
        """Return a path of ``name`` in this folder that leads there by the descriptor, in this process and its forks.

        Where the system has no such paths, return the path by which the folder was opened.
        """
        pinned = Path(f"/proc/self/fd/{self.fd}")
        return (pinned if _has_pinned_paths() else self.path) / name

    def open_file(self, name: str, flags: int = os.O_RDONLY, *, own: bool = False) -> int:
        """Return a descriptor of the file ``name``; with O_CREAT, a new file is for this user alone.

        Links are not followed, and a FIFO or a device is no file.

        Args:
            own: whether the file must be one that no other user can have written to.

        Raises:
            OSError: if it cannot be opened, or is no plain file.
            LagomError: if it is not this user's, with ``own``.
        """
        try:
            fd = os.open(self.at(name), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:  # name the path that the user knows
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self.path / name} is no plain file")
            if own and not _is_own(status):
                raise LagomError(_not_own(self.path / name))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, name: str, *, own: bool = False) -> bytes:
        """Return the content of the file ``name``; see ``open_file``."""
        with open(self.open_file(name, own=own), "rb") as file:
            return file.read()

    def write(self, name: str, data: str | bytes, *, sync: bool = False) -> None:
        """Write a new file beside ``name``, and give it this name, in place of what had it.

        Raises:
            OSError: if it cannot be written.
        """
        with self.replacing(name, sync=sync) as fd:
            view = memoryview(data.encode() if isinstance(data, str) else data)
            while view:
                view = view[os.write(fd, view) :]

    @contextmanager
    def replacing(self, name: str, *, sync: bool = False) -> Iterator[int]:
        """Yield the descriptor of a new file, which has the name ``name`` after the context; none after an error."""
        partial = f".{name}.{secrets.token_hex(4)}"
        fd = os.open(self.at(partial), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            yield fd
            if sync:
                os.fsync(fd)
            os.rename(self.at(partial), self.at(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(self.at(partial))
            raise
        finally:
            os.close(fd)

    def rename(self, name: str, other: str) -> None:
        """Give the file ``name`` the name ``other``, in place of what had it."""
        os.rename(self.at(name), self.at(other))

    def remove(self, name: str) -> None:
        """Remove the file ``name``, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(self.at(name))

    def exists(self, name: str) -> bool:
        """Return whether there is a file, a folder or a link with this name."""
        with suppress(OSError):
            os.lstat(self.at(name))
            return True
        return False

    def is_newer(self, name: str, than: str) -> bool:
        """Return whether the files ``name`` and ``than`` are there, and ``name`` was changed last."""
        with suppress(OSError):
            found = [os.lstat(self.at(each)) for each in (name, than)]
            return stat.S_ISREG(found[0].st_mode) and found[0].st_mtime >= found[1].st_mtime
        return False

    def names(self) -> list[str]:
        """Return the names of all files and folders; none if the folder has been removed."""
        return sorted(os.listdir(self.fd))


def write_file(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write the file ``path`` as ``RunFolder.write`` does; a link there is replaced, a device or a FIFO written to.

    Raises:
        OSError: if it cannot be written.
    """
    path = Path(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISLNK(mode):
            path.write_bytes(data.encode() if isinstance(data, str) else data)
            return
    folder = RunFolder.open(path.parent)
    try:
        folder.write(path.name, data)
    finally:
        folder.close()


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


def _not_own(path: Path) -> str:
    return (
        f"{path} is not this user's alone, so what it holds is not run; copy a folder that you trust, or chown and "
        "chmod -R go-w"
    )


def _has_pinned_paths() -> bool:
    return os.path.isdir("/proc/self/fd")


def _close(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # in a fork, the number may be another file's
        os.close(fd)


# Note [Folders of runs]
#
# What is in the folder of a run is acted on: calls and snapshots are unpickled, a command line is run again, files are
# written and removed. So no other user may be able to put anything there, also if the folder is below one in which
# others can rename it and put another folder, or a link, in its place: a check by path is over when the path is used.
# A folder is opened once, and looked at by its descriptor: it has to be this user's, and nobody else's to write. All
# files are then reached by this descriptor (/proc/self/fd/N/NAME on Linux), and looked at by theirs. The folder's owner
# decides: whoever can write above it can give it another name, or remove it, but cannot make one that is this user's.
#
# Ranks on the driver's host open the driver's descriptor (FolderReference), so they are in the same folder. Ranks on
# other hosts open the path, and check owner and digests.
