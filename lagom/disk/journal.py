"""``PathLog`` and ``Journal``: a log that processes share, and the state of paths before rank 0's changes."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

Kind = Literal["absent", "aside", "shared", "free", "put", "gone"]
"""The state of a path, and of paths below it.

In rank 0's journal, the state before rank 0's first change of the path:

- "absent": nothing was there.
- "aside": the original is kept at ``other``.
- "shared": a download of rank 0, which the other ranks of its host read at the path itself.

In the log of another rank:

- "put": the rank's own version is in its folder.
- "gone": the rank has removed the file or directory.

In both: "free", for a path of the real disk that is never put aside nor copied, such as a temporary file.
"""
Change = Literal["name", "content", "truncate", "tree"]
"""The change of a path that comes next.

- "name": the path is removed, made or replaced.
- "content": the content of the file is changed.
- "truncate": the content of the file is discarded.
- "tree": a file, or a directory with its content, is renamed.
"""

_FICLONE = 0x40049409  # from linux/fs.h
_READING = threading.RLock()
os.register_at_fork(before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The latest state of a path; it holds also for paths below it that have no entry of their own."""

    kind: Kind
    other: str = ""
    """Path at which the original is kept, for "aside"; else empty."""


class PathLog:
    """Entries by path, in a file to which processes append; ``fresh`` reads the entries of other processes."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.num_read = 0
        """Bytes read so far; grows with each entry."""
        self.entries: dict[str, JournalEntry] = {}
        self.children: dict[str, set[str]] = {}
        """Names of the entries directly in a directory, by the directory's path."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def size(self) -> int:
        """Return the bytes that all processes have written."""
        return os.lseek(self._fd, 0, os.SEEK_END)  # the fastest system call for the size: every read asks for it

    def fresh(self) -> None:
        """Read the entries that were added since the last time."""
        if self.size() == self.num_read:
            return
        with _READING:
            data = os.pread(self._fd, self.size() - self.num_read, self.num_read)
            lines = data[: data.rfind(b"\n") + 1]
            for line in lines.splitlines():
                kind, path, other, over_tree = json.loads(line)
                self._apply(path, JournalEntry(kind, other), over_tree)
            self.num_read += len(lines)

    def add(self, kind: Kind, path: str, other: str = "", over_tree: bool = False) -> None:
        """Add an entry for ``path``; with ``over_tree`` all entries of paths below it are removed."""
        # One write, so that lines of several processes do not mix.
        os.write(self._fd, json.dumps([kind, path, other, over_tree]).encode() + b"\n")
        self.fresh()

    def nearest(self, path: str) -> tuple[str, JournalEntry] | None:
        """Return the entry of ``path``, or of the closest directory above it that has one, with its path; else None."""
        entries = self.entries
        if not entries:
            return None
        while True:
            entry = entries.get(path)
            if entry is not None:
                return path, entry
            if path == "/":
                return None
            path = path[: path.rfind("/")] or "/"

    def touches(self, directory: str) -> bool:
        """Return whether there is an entry for ``directory``, for a path directly in it, or for a directory above."""
        self.fresh()
        return directory in self.children or self.nearest(directory) is not None

    def _apply(self, path: str, entry: JournalEntry, over_tree: bool) -> None:
        if over_tree:
            below = path + "/"
            for other in [other for other in self.entries if other.startswith(below)]:
                del self.entries[other]
                self.children[os.path.dirname(other)].discard(os.path.basename(other))
        self.entries[path] = entry
        self.children.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))


class Journal:
    """Record of a host's disk before rank 0's changes, which the other ranks of the host read."""

    def __init__(self, folder: str) -> None:
        """Open the journal in ``folder``, which the ranks of the host share."""
        os.makedirs(folder + "/aside", mode=0o700, exist_ok=True)
        self.log = PathLog(folder + "/journal")
        self._aside = folder + "/aside/"
        self._numbers = itertools.count()
        self._lock_path = folder + "/lock"

    def close(self) -> None:
        """Close the log's file."""
        self.log.close()

    def lower(self, key: str) -> str | None:
        """Return the path at which the original of ``key`` is; None if nothing was at ``key``."""
        found = self.log.nearest(key)
        if found is None:
            return key
        at, entry = found
        if entry.kind == "absent":
            return None
        return entry.other + key[len(at) :] if entry.kind == "aside" else key

    def before(self, key: str, change: Change) -> None:
        """Record or put aside the original of ``key`` before rank 0's first change.

        Pipes, devices and, unless they are renamed, directories with content are not recorded.
        """
        if self._is_known(key):
            if change in ("content", "truncate"):
                self._part(key, keep_content=change == "content")
            return
        with self._alone():
            if self._is_known(key):
                return
            try:
                mode = os.lstat(key).st_mode
            except NotADirectoryError:
                return  # a parent is a file, so the change will fail
            except OSError:
                self.log.add("absent", key)
                return
            if stat.S_ISREG(mode):
                self._put_file_aside(key, change)
            elif stat.S_ISLNK(mode):
                aside = self._new_aside()
                os.symlink(os.readlink(key), aside)
                self.log.add("aside", key, aside)
            elif stat.S_ISDIR(mode) and (change == "tree" or not os.listdir(key)):
                aside = self._new_aside()
                shutil.copytree(key, aside, symlinks=True, copy_function=self._copy_kept)
                self.log.add("aside", key, aside)

    def share(self, key: str) -> None:
        """Let the other ranks see the file that will be at ``key``: a download that rank 0 does for all."""
        found = self.log.nearest(key)
        if found is not None and found[1].kind in ("absent", "aside"):
            self.log.add("shared", key)

    def _is_known(self, key: str) -> bool:
        self.log.fresh()  # a loader worker of this rank may have added entries
        found = self.log.nearest(key)
        return found is not None and found[1].kind != "shared"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Open the file anew each time: ``flock`` then excludes other threads of this process as well.
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _new_aside(self) -> str:
        return f"{self._aside}{os.getpid()}.{next(self._numbers)}"

    def _kept(self, key: str) -> str:
        """Keep the regular file ``key`` by a hard link, or else by a copy; return the path of the link or copy."""
        info = os.lstat(key)
        kept = self._inode(info)
        try:
            if info.st_nlink == 1:
                os.link(key, kept)
                return kept
        except OSError:
            pass  # on another file system
        aside = self._new_aside()
        copy(key, aside)
        return aside

    def _inode(self, info: os.stat_result) -> str:
        return f"{self._aside}inode.{info.st_dev}.{info.st_ino}"

    def _copy_kept(self, source: str, target: str) -> None:
        """Keep ``source``, a file in a directory that is put aside, as ``target``."""
        mode = os.lstat(source).st_mode
        if not stat.S_ISREG(mode):
            os.mknod(target, mode)  # a pipe or a socket
            return
        kept = self._kept(source)
        try:
            os.link(kept, target)
        except OSError:
            copy(kept, target)

    def _part(self, key: str, keep_content: bool) -> None:
        """Replace ``key`` by a file of its own if it is still a hard link to a file that was put aside."""
        with suppress(OSError):
            info = os.lstat(key)
            if info.st_nlink > 1 and os.path.lexists(self._inode(info)):
                fresh = self._renewed(key, keep_content, num_links=info.st_nlink)
                if fresh is not None:
                    os.rename(fresh, key)

    def _put_file_aside(self, key: str, change: Change) -> None:
        """Put the file itself aside; if it is about to be changed in place, leave a copy. See Note [New inode]."""
        if change not in ("content", "truncate"):
            self.log.add("aside", key, self._kept(key))
            return
        fresh = self._renewed(key, keep_content=change == "content")
        if fresh is None:
            aside = self._new_aside()
            copy(key, aside)
            self.log.add("aside", key, aside)
            return
        try:
            self.log.add("aside", key, self._kept(key))
            os.rename(fresh, key)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(fresh)

    def _renewed(self, key: str, keep_content: bool, num_links: int = 1) -> str | None:
        """Make a file beside ``key`` that can replace it, and return its path; None if this is impossible.

        It is impossible if ``key`` does not have exactly ``num_links`` hard links, if it belongs to another user, or if
        the system does not allow it.
        """
        info = os.lstat(key)
        if info.st_nlink != num_links or info.st_uid != os.geteuid():
            return None
        fresh = f"{key}.{os.getpid()}.lagom"
        if not self._is_known(fresh):
            self.log.add("absent", fresh)  # the other ranks do not see it
        try:
            if keep_content:
                copy(key, fresh)
            else:
                os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                os.chmod(fresh, stat.S_IMODE(info.st_mode))
            if os.lstat(fresh).st_gid != info.st_gid:
                os.chown(fresh, -1, info.st_gid)
        except OSError:
            with suppress(OSError):
                os.unlink(fresh)
            return None
        return fresh


def copy(source: str, target: str) -> None:
    """Make a new file with content, mode and times of ``source``; the two share blocks if the file system can."""
    with open(source, "rb") as read, open(target, "wb") as written:
        try:
            fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, written, 1 << 20)
    shutil.copystat(source, target)


# Note [New inode]
# A rank that is behind may have a file open while rank 0 changes it, and must go on reading the original. So before
# rank 0 writes into a file that was there at the start, it keeps a hard link to the file and puts another file in its
# place: a copy or, if the content is discarded, an empty file. This is impossible for a file that belongs to another
# user, has several hard links, is in a directory that cannot be written, or is itself a mount point. Such a file is
# changed in place, and a copy of the original is kept.
