"""``FirstRankCalls``: rank 0 uses the real disk, and records the state of a path before it changes the path."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from lagom.files.calls import FileCalls, opens_to_read
from lagom.files.journal import Change, Journal
from lagom.files.listing import Scan

log = logging.getLogger("lagom")

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class FirstRankCalls(FileCalls):
    """The file functions of rank 0."""

    was_asked = False
    """Whether the program has asked which rank it is."""

    def __init__(self, host_dir: str, journal: Journal, by_name: bool) -> None:
        """List all directories sorted if ``by_name``, since the disks of other hosts have orders of their own."""
        super().__init__(host_dir)
        self._journal = journal
        self._by_name = by_name

    def replacements(self) -> dict[str, Any]:
        changes: dict[str, Change] = {"mkdir": "name", "unlink": "name", "remove": "name", "rmdir": "rmdir"}
        changes |= {"truncate": "content"}
        found: dict[str, Any] = {name: self._noting(name, change) for name, change in changes.items()}
        found |= {name: self._noting_two(name) for name in ("rename", "replace", "link", "symlink")}
        return found | {
            "open": self._open(),
            "io.open": self._io_open(),
            "listdir": self._sorting("listdir", lambda names: names, str),
            "scandir": self._sorting("scandir", Scan, lambda entry: entry.name),
        }

    def free(self, path: str) -> None:
        self._journal.log.add("free", path)

    def asked(self) -> None:
        self.was_asked = True

    def written(self, path: str) -> str:
        self._note(path, None, follow=True, change="content")
        return path

    def found(self, path: str, dir_fd: int | None = None, follow: bool = True) -> str:
        return path

    def listed(self, path: str) -> str:
        return path

    def _note(self, path: Any, dir_fd: int | None, follow: bool, change: Change) -> None:
        self.own.inside = True
        try:
            absolute = self.absolute(path, dir_fd)
            if absolute is None:
                return
            key = self._key(absolute, follow)
            if self.left_alone(key):
                return
            if self.downloads():
                self._journal.share(key)
            else:
                self._journal.before(key, change)
        except OSError as error:
            log.warning("%s was changed before its state could be kept for the other ranks: %s", path, error)
        finally:
            self.own.inside = False

    def _key(self, path: str, follow: bool) -> str:
        head, _, tail = path.rpartition("/")
        if follow or tail in ("", ".", ".."):
            return os.path.realpath(path)
        directory = os.path.realpath(head or "/")
        return f"{directory.rstrip('/')}/{tail}"

    def _noting(self, name: str, change: Change) -> Callable[..., Any]:
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if not self.own.inside:
                self._note(path, dir_fd, name == "truncate", change)
            return original(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))

        return call

    def _noting_two(self, name: str) -> Callable[..., Any]:
        original = self.original[name]

        @functools.wraps(original)
        def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.own.inside:
                to = kwargs.get("dst_dir_fd", kwargs.get("dir_fd"))
                if name in ("rename", "replace"):
                    self._note(src, kwargs.get("src_dir_fd"), False, "tree")
                    self._note(dst, to, False, "rmdir")
                if name == "link":  # a write by one name changes the file under the other
                    self._note(src, kwargs.get("src_dir_fd"), False, "content")
                self._note(dst, to, False, "name")
            return original(src, dst, *args, **kwargs)

        return call

    def _open(self) -> Callable[..., Any]:
        original = self.original["open"]

        @functools.wraps(original)
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & _WRITES and not self.own.inside:
                self._note_opening(path, flags, dir_fd)
            fd: int = original(path, flags, mode, dir_fd=dir_fd)
            return fd

        return call

    def _note_opening(self, path: Any, flags: int, dir_fd: int | None) -> None:
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        change: Change = "name" if exclusive else "truncate" if flags & os.O_TRUNC else "content"
        self._note(path, dir_fd, not exclusive and not flags & os.O_NOFOLLOW, change)

    def _io_open(self) -> Callable[..., Any]:
        original, opened = self.original["io.open"], self.original["open"]

        def note(path: Any, flags: int) -> int:
            self._note_opening(path, flags, None)
            fd: int = opened(path, flags, 0o666)
            return fd

        @functools.wraps(original)
        def call(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            plain = self.own.inside or opens_to_read(mode) or isinstance(file, int)
            if plain or len(args) > 5 or kwargs.get("opener") is not None:
                return original(file, mode, *args, **kwargs)
            return original(file, mode, *args, **kwargs | {"opener": note})

        return call

    def _sorting(self, name: str, made: Callable[[Any], Any], by: Callable[[Any], Any]) -> Callable[..., Any]:
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any = ".") -> Any:
            found = original(path)
            if self.own.inside or not (self._by_name or self._is_touched(path)):
                return found
            return made(sorted(found, key=by))

        return call

    def _is_touched(self, path: Any) -> bool:
        log = self._journal.log
        log.fresh()
        self.own.inside = True
        try:
            absolute = self.of(path) if isinstance(path, int) else self.absolute("." if path is None else path, None)
            if absolute is None:
                return False
            key = os.path.realpath(absolute)
            return key in log.children or log.nearest(key) is not None
        except OSError:
            return False
        finally:
            self.own.inside = False
