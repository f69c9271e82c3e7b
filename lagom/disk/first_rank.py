"""``FirstRankCalls``: rank 0 uses the real disk, and records the state of a path before it changes the path."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from lagom.disk.calls import FileCalls, Scan
from lagom.disk.journal import Change, Journal, Kind, PathLog

log = logging.getLogger("lagom")

_NAMING = ("mkdir", "mkfifo", "mknod", "unlink", "remove", "rmdir")
"""Functions that make or remove the path that is their first argument."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class FirstRankCalls(FileCalls):
    """Replaces the file functions on rank 0: calls reach the real disk.

    The journal records a path before its name or content changes. Changes of mode, times and attributes are not
    recorded.
    """

    def __init__(self, host_dir: str, by_name: bool, journal: Journal) -> None:
        super().__init__(host_dir, by_name)
        self._journal = journal
        self.on_change: Callable[[str], None] = lambda path: None
        """Called with a path before each change of its name or content, unless lagom leaves the path alone."""

    def replacements(self) -> dict[str, Any]:
        wrapped = {name: self._noting(name, self._note_name) for name in _NAMING}
        wrapped |= {name: self._noting(name, self._note_renaming) for name in ("rename", "replace")}
        wrapped |= {
            "truncate": self._noting("truncate", lambda path, *_, **__: self._note(path, None, True, "content")),
            "link": self._noting("link", self._note_linking),
            "symlink": self._noting("symlink", lambda src, dst, *args, **at: self._note_name(dst, **at)),
            "open": self._noting("open", self._note_opening),
            "listdir": self._sorting("listdir", lambda names: names, str),
            "scandir": self._sorting("scandir", Scan, lambda entry: entry.name),
        }
        return wrapped | {"io.open": self.io_open(wrapped["open"])}

    def free(self, path: str) -> None:
        self._journal.log.add("free", path)

    def path_to_write(self, path: str) -> str:
        self._note(path, None, follow=True, change="content")
        return path

    def own_key(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str | None:
        """Return the key (see overlay.py) of a path; None for a download, or a path that lagom leaves alone."""
        absolute = self.absolute(path, dir_fd)
        if absolute is None or self.downloads():
            return None
        self.own.inside = True
        try:
            key = _key(absolute, follow)
            return None if self.left_alone(key) else key
        except OSError:
            return None
        finally:
            self.own.inside = False

    def note_truncation(self, path: Any) -> None:
        """Keep the original of ``path`` for the other ranks before the program discards its content."""
        self._note(path, None, True, "truncate")

    def original_of(self, key: str) -> str | None:
        """Return the path of the original of ``key``: ``key`` itself, or where it is kept; None without a file."""
        return self._journal.lower(key)

    def _noting(self, name: str, note: Callable[..., None]) -> Callable[..., Any]:
        """Wrap a function of ``os`` that changes the disk; ``note`` is called first, with the same arguments."""
        original = self.original[name]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.own.inside:
                note(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    def _note(self, path: Any, dir_fd: int | None, follow: bool, change: Change) -> None:
        absolute = self.absolute(path, dir_fd)
        if absolute is None:
            return
        self.own.inside = True
        try:
            key = _key(absolute, follow)
            if self.left_alone(key):
                return
            self.on_change(key)
            if self.downloads():
                self._journal.share(key)
            else:
                self._journal.before(key, change)
        except OSError as error:
            log.warning("%s was changed before its state could be kept for the other ranks: %s", path, error)
        finally:
            self.own.inside = False

    # Each of these functions takes the arguments of the function of ``os`` before which it is called.

    def _note_name(self, path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        self._note(path, dir_fd, False, "name")

    def _note_renaming(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        self._note(src, src_dir_fd, False, "tree")
        self._note(dst, dst_dir_fd, False, "name")

    def _note_linking(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **_: Any
    ) -> None:
        self._note(src, src_dir_fd, False, "content")  # a write by the new name would change ``src`` too
        self._note(dst, dst_dir_fd, False, "name")

    def _note_opening(self, path: Any, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> None:
        if flags & _WRITES:
            exclusive = flags & os.O_CREAT and flags & os.O_EXCL
            change: Change = "name" if exclusive else "truncate" if flags & os.O_TRUNC else "content"
            self._note(path, dir_fd, not exclusive and not flags & os.O_NOFOLLOW, change)

    # Listing

    def _sorting(self, name: str, made: Callable[[Any], Any], by: Callable[[Any], Any]) -> Callable[..., Any]:
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any = ".") -> Any:
            found = original(path)
            if self.own.inside or not (self.by_name or self._is_touched(path)):
                return found
            return made(sorted(found, key=by))

        return call

    def _is_touched(self, path: Any) -> bool:
        try:
            absolute = self.of(path) if isinstance(path, int) else self.absolute("." if path is None else path, None)
            return absolute is not None and self._journal.log.touches(os.path.realpath(absolute))
        except OSError:
            return False


class NoJournal(Journal):
    """The journal of a run of one rank, which records nothing, since no other rank reads it."""

    def __init__(self) -> None:
        self.log = _NoLog()

    def lower(self, key: str) -> str | None:
        return key

    def before(self, key: str, change: Change) -> None:
        pass

    def share(self, key: str) -> None:
        pass


class _NoLog(PathLog):
    def __init__(self) -> None:
        self.entries, self.children, self.num_read = {}, {}, 0

    def close(self) -> None:
        pass

    def size(self) -> int:
        return 0

    def add(self, kind: Kind, path: str, other: str = "", over_tree: bool = False) -> None:
        pass


def _key(path: str, follow: bool) -> str:
    head, _, tail = path.rpartition("/")
    if follow or tail in ("", ".", ".."):
        return os.path.realpath(path)
    directory = os.path.realpath(head or "/")
    return f"{directory.rstrip('/')}/{tail}"
