"""``View``: finds files for a rank with an overlay, which sees the disk at the run's start plus its own changes.

A ``key`` is an absolute path by which the program knows a file; only its last part may be a symbolic link. A ``place``
is the path at which the file is in fact. See Note [A disk of each rank's own] in install.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from lagom.disk.journal import Journal, PathLog
from lagom.restart.written_files import is_sibling

T = TypeVar("T")

_MAX_LINKS = 40  # links that a path may follow, as in Linux


class View:
    """Finds the place of a file: in the rank's folder (``upper``), put aside by rank 0, or at the key."""

    def __init__(
        self, folder: str, journal: Journal, left_alone: Callable[[str], bool], downloads: Callable[[], bool]
    ) -> None:
        """Keep the rank's files and log in ``folder``.

        Args:
            left_alone: returns whether a key is on the real disk for every rank.
            downloads: returns whether this thread downloads, so that its files go to the real disk.
        """
        self.upper = folder + "/files"
        os.makedirs(self.upper, mode=0o700, exist_ok=True)
        self.log = PathLog(folder + "/log")
        self.journal = journal
        self.left_alone = left_alone
        self.downloads = downloads
        self.folder = folder
        self._nowhere = folder + "/nothing"
        self._listings: list[str] = []
        self._directories: dict[str, str] = {}
        """Keys of directories, by the program's path."""
        self._state = (0, 0)

    def close(self) -> None:
        """Close the rank's log."""
        self.log.close()

    def _refresh(self) -> None:
        self.log.fresh()
        self.journal.log.fresh()
        state = (self.log.num_read, self.journal.log.num_read)
        if state != self._state:
            self._directories = {}  # a new dict, since another thread may be using the old one
            self._state = state

    # Where things are

    def key(self, path: str, follow: bool) -> str:
        """Return the key of an absolute path; with ``follow``, and if the path is a link, the key of its target."""
        self._refresh()
        head, _, tail = path.rpartition("/")
        if tail in ("", ".", ".."):
            return self._resolved(path)
        directories = self._directories
        directory = directories.get(head)
        if directory is None:
            directory = directories[head] = self._resolved(head)
        key = f"/{tail}" if directory == "/" else f"{directory}/{tail}"
        return self._resolved(key) if follow and self._link(key) is not None else key

    def _resolved(self, path: str) -> str:
        done, todo, num_links = "/", path.split("/")[::-1], 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = os.path.dirname(done)
                continue
            key = f"/{part}" if done == "/" else f"{done}/{part}"
            link = self._link(key)
            if link is None:
                done = key
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            done = "/" if link.startswith("/") else done
            todo += link.split("/")[::-1]
        return done

    def _link(self, key: str) -> str | None:
        try:
            return self.read(key, os.readlink)
        except OSError:
            return None

    def place(self, key: str) -> str:
        """Return the path where this rank reads ``key`` now; a path that never exists if the rank must see no file."""
        if self.left_alone(key):
            return key
        own = self.log.nearest(key)
        if own is None:
            return self.journal.lower(key) or self._nowhere + key
        at, entry = own
        if entry.kind == "free":
            return key
        if entry.kind == "put":
            if self._is_shared_below(key, at):
                return key
            return self.upper + key
        return self._nowhere + key

    def _is_shared_below(self, key: str, at: str) -> bool:
        """Return whether ``key``, below the directory ``at`` of this rank's folder, is a download of rank 0."""
        found = self.journal.log.nearest(key)
        if found is None or found[1].kind != "shared" or len(found[0]) < len(at):
            return False
        return not os.path.lexists(self.upper + key)

    def is_own(self, key: str) -> bool:
        """Return whether the place of ``key`` is in the rank's own folder, also if no file is there."""
        return self.place(key).startswith(self.upper + "/")

    def seen(self, place: str) -> str:
        """Return the path by which the program knows ``place``."""
        if not place.startswith(os.path.dirname(self.folder) + "/"):
            return place
        for inner in (self.upper, self._nowhere, *self._listings):
            if place == inner or place.startswith(inner + "/"):
                return place[len(inner) :] or "/"
        for key, entry in self.journal.log.entries.items():
            if entry.kind == "aside" and (place == entry.other or place.startswith(entry.other + "/")):
                return key + place[len(entry.other) :]
        return place

    # Reading

    def read(self, key: str, call: Callable[[str], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """Return the result of ``call`` with the place of ``key``; call again if the place has changed meanwhile.

        ``undo`` takes the result of a call that is repeated.
        """
        theirs = self.journal.log
        while True:
            num_read, place = theirs.num_read, self.place(key)
            try:
                result = call(place)
            except OSError:
                theirs.fresh()
                if theirs.num_read != num_read and self.place(key) != place:
                    continue
                raise
            theirs.fresh()
            if theirs.num_read == num_read or self.place(key) == place:
                return result
            undo(result)

    def is_untouched(self, path: str) -> bool:
        """Return whether the directory at the absolute ``path`` on the real disk is the one that the rank sees."""
        key = self.key(path + "/", follow=True)
        touched = self.log.touches(key) or self.journal.log.touches(key)
        # On the real disk the links in the path may lead elsewhere.
        return not touched and self.place(key) == key == os.path.realpath(path)

    def lstat(self, key: str) -> os.stat_result:
        """Return the status of ``key`` itself."""
        return self.read(key, os.lstat)

    def mode(self, key: str) -> int:
        """Return type and permissions of ``key``; 0 if it does not exist."""
        try:
            return self.lstat(key).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def names(self, key: str) -> list[str]:
        """Return the names in the directory ``key``, sorted; see Note [Order of a directory] in install.py."""

        def look(place: str) -> list[str]:
            found = {name for name in os.listdir(place) if not is_sibling(name)}
            self.journal.log.fresh()  # A record precedes its change, so every new name seen above is recorded by now.
            in_doubt = self.log.children.get(key, set()) | self.journal.log.children.get(key, set())
            return sorted(
                child for child in found | in_doubt if child not in in_doubt or self.mode(os.path.join(key, child))
            )

        return self.read(key, look)

    def listed(self, key: str) -> str:
        """Return a directory for C code to list in place of ``key``.

        It is the place of ``key`` if its names are those that the rank sees; otherwise a new folder with these names.
        """
        place, names = self.place(key), self.names(key)
        if set(os.listdir(place)) == set(names):
            return place
        entries = [(name, self.mode(os.path.join(key, name)), self.place(os.path.join(key, name))) for name in names]
        top = f"{self.folder}/listing.{os.getpid()}.{zlib.crc32(repr((key, entries)).encode()):x}"
        if not os.path.isdir(top):
            self._list(f"{top}.{threading.get_ident()}", key, entries)
            with contextlib.suppress(OSError):  # another thread was first
                os.rename(f"{top}.{threading.get_ident()}", top)
            self._listings.append(top)
        return top + key

    def _list(self, top: str, key: str, entries: Sequence[tuple[str, int, str]]) -> None:
        os.makedirs(top + key)
        for name, mode, place in entries:
            if stat.S_ISDIR(mode):
                os.mkdir(f"{top}{key}/{name}")
            elif mode:
                os.symlink(place, f"{top}{key}/{name}")
