"""``View``: where a rank other than 0 finds things, which is as they were at the start, with its own changes.

Paths called ``key`` are absolute and lead over no symbolic link. See Note [A disk of each rank's own] in install.py.
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

from lagom.files.journal import Journal, PathLog, join, parent

T = TypeVar("T")

_MAX_LINKS = 40  # that a path may lead over, as in Linux


class View:
    """Where things are: in the rank's own folder (``upper``), put aside by the first rank, or where they seem to be."""

    def __init__(
        self, folder: str, journal: Journal, left_alone: Callable[[str], bool], downloads: Callable[[], bool]
    ) -> None:
        """``folder`` is the rank's own; what is ``left_alone`` is always the real disk, and ``downloads`` go there."""
        self.upper = folder + "/files"
        os.makedirs(self.upper, mode=0o700, exist_ok=True)
        self.log = PathLog(folder + "/log")
        self.journal = journal
        self.left_alone = left_alone
        self.downloads = downloads
        self.cwd: str | None = None
        """The working directory, when the process stands elsewhere in truth."""
        self.folder = folder
        self._nowhere = folder + "/nothing"
        self._listings: list[str] = []
        self._directories: dict[str, str] = {}
        """Their keys, by what they are called."""
        self.clean: dict[str, set[str] | None] = {}
        """Directories, as the program calls them, with a slash at the end: names in them that are not to be looked for
        on the disk itself; None: none is."""
        self._state = (0, 0)

    def close(self) -> None:
        """Let go of its log."""
        self.log.close()

    def is_steady(self) -> bool:
        """Whether nobody has changed anything since ``clean`` was filled."""
        return (self.log.size(), self.journal.log.size()) == self._state

    def learn(self, head: str, absolute: str) -> set[str] | None:
        """What ``clean`` says of the directory ``head``, which is ``absolute``, found out and kept."""
        key = self.key(absolute + "/", follow=True)
        clean = self.clean  # another thread that finds something changed puts another in its place
        # Links on the way may be others than on the disk.
        if self.place(key) == key == os.path.realpath(head or "."):
            found = self.log.children.get(key, set()) | self.journal.log.children.get(key, set())
        else:
            found = None
        clean[head] = found
        return found

    def _refresh(self) -> None:
        self.log.fresh()
        self.journal.log.fresh()
        state = (self.log.num_read, self.journal.log.num_read)
        if state != self._state:
            self._directories.clear()
            self.clean = {}
            self._state = state

    # Where things are

    def key(self, path: str, follow: bool) -> str:
        """Of an absolute path; with ``follow``, of what it points at when it is a link."""
        self._refresh()
        head, _, tail = path.rpartition("/")
        if tail in ("", ".", ".."):
            return self._resolved(path)
        directory = self._directories.get(head)
        if directory is None:
            directory = self._directories[head] = self._resolved(head)
        key = f"/{tail}" if directory == "/" else f"{directory}/{tail}"
        return self._resolved(key) if follow and self._link(key) is not None else key

    def _resolved(self, path: str) -> str:
        done, todo, num_links = "/", path.split("/")[::-1], 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = parent(done)
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
            return self.read(key, _link_at)
        except OSError:
            return None

    def place(self, key: str) -> str:
        """Where ``key`` is found now; a path where nothing ever is, when it does not exist for this rank."""
        if self.left_alone(key):
            return key
        own = self.log.nearest(key)
        if own is None:
            return self._lower(key)
        at, entry = own
        if entry.kind == "free":
            return key
        if entry.kind == "put":
            if self._is_shared_below(key, at):
                return key
            return self.upper + key
        return self._nowhere + key

    def _lower(self, key: str) -> str:
        lower = self.journal.lower(key)
        return self._nowhere + key if lower is None else lower

    def _is_shared_below(self, key: str, at: str) -> bool:
        """Whether a download of the first rank's stands at ``key``, in a directory ``at`` that is this rank's own."""
        found = self.journal.log.nearest(key)
        if found is None or found[1].kind != "shared" or len(found[0]) < len(at):
            return False
        return not os.path.lexists(self.upper + key)

    def is_own(self, key: str) -> bool:
        """Whether ``key`` is, or would be, in the rank's own folder."""
        return self.place(key).startswith(self.upper + "/")

    def seen(self, place: str) -> str:
        """The path that the program knows ``place`` by."""
        for inner in (self.upper, self._nowhere, *self._listings):
            if place == inner or place.startswith(inner + "/"):
                return place[len(inner) :] or "/"
        for key, entry in self.journal.log.entries.items():
            if entry.kind == "aside" and (place == entry.other or place.startswith(entry.other + "/")):
                return key + place[len(entry.other) :]
        return place

    # Reading

    def read(self, key: str, call: Callable[[str], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """``call`` with the place of ``key``; again when the first rank changed it meanwhile."""
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

    def lstat(self, key: str) -> os.stat_result:
        """What stands at ``key``."""
        return self.read(key, os.lstat)

    def mode(self, key: str) -> int:
        """Kind and permissions of what stands at ``key``; 0 when nothing does."""
        try:
            return self.lstat(key).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def names(self, key: str) -> list[str]:
        """What is in the directory ``key``, sorted; see Note [Order of a directory] in install.py."""
        return self.read(key, lambda place: self._names(key, place))

    def listed(self, key: str) -> str:
        """A directory for C code to list: that at ``key``, or one with its names where the disk has others."""
        place, names = self.place(key), self.names(key)
        if set(os.listdir(place)) == set(names):
            return place
        entries = [(name, self.mode(join(key, name)), self.place(join(key, name))) for name in names]
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

    def _names(self, key: str, place: str) -> list[str]:
        found = set(os.listdir(place))
        self.journal.log.fresh()  # a note comes before its change: whatever is new in there has been noted by now
        own, theirs = self.log, self.journal.log
        covered = own.nearest(key) is not None
        for child in list(theirs.children.get(key, ())):
            kind = theirs.entries[join(key, child)].kind
            if kind == "shared" or (kind == "aside" and not covered):
                found.add(child)
            elif kind == "absent" and not covered:
                found.discard(child)
        for child in list(own.children.get(key, ())):
            found.add(child)
        in_doubt = theirs.children.get(key, set()) | own.children.get(key, set())
        return sorted(child for child in found if child not in in_doubt or self.mode(join(key, child)))


def _link_at(place: str) -> str | None:
    return os.readlink(place) if stat.S_ISLNK(os.lstat(place).st_mode) else None
