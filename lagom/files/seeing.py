"""``SeenFiles``: finds and reads the files that a rank other than 0 sees."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from typing import Any

from lagom.files.calls import FileCalls
from lagom.files.journal import Journal
from lagom.files.listing import ListedEntry, Scan
from lagom.files.overlay import Overlay

ELSEWHERE = object()
"""The rank sees something else at a path than the disk has there."""


class SeenFiles(FileCalls):
    """The read-only part of a rank's file functions."""

    def __init__(self, host_dir: str, folder: str, journal: Journal, by_name: bool) -> None:
        """Read from the rank's own ``folder``; with ``by_name`` list all directories by name, since hosts differ."""
        super().__init__(host_dir)
        self.overlay = Overlay(folder, journal, self.left_alone, self.downloads)
        self._by_name = by_name
        self.opened_directories: dict[int, tuple[str, int, int]] = {}
        self._lstat = self.original["lstat"]

    def found(self, path: str, dir_fd: int | None = None, follow: bool = True) -> str:
        key = self.key(path, dir_fd, follow)
        return path if key is None else self.inside(lambda: self.overlay.place(key), path)

    def listed(self, path: str) -> str:
        key = self.key(path, None, follow=True)
        return path if key is None else self.inside(lambda: self.overlay.listed(key), path)

    def of(self, fd: int) -> str:
        try:
            info = os.fstat(fd)
        except OSError:
            self.opened_directories.pop(fd, None)
            raise
        key, dev, ino = self.opened_directories.get(fd, ("", 0, 0))
        # /proc is the fallback: rank 0 may have moved the directory since.
        return key if (dev, ino) == (info.st_dev, info.st_ino) else self.overlay.seen(super().of(fd))

    def inside(self, call: Callable[[], Any], path: Any, to: Any = None) -> Any:
        """Run ``call`` with lagom's own calls reaching the disk; its exceptions name the program's paths."""
        self.own.inside = True
        try:
            return call()
        except OSError as error:
            name_in(error, path, to)
            raise
        finally:
            self.own.inside = False

    def key(self, path: Any, dir_fd: int | None, follow: bool) -> str | None:
        """Return the overlay's key of ``path``; None if the call is not for the overlay."""
        absolute = self._absolute(path, dir_fd)
        if absolute is None:
            return None
        self.own.inside = True
        try:
            return self.overlay.key(absolute, follow)
        except OSError as error:
            name_in(error, path)
            raise
        finally:
            self.own.inside = False

    def _absolute(self, path: Any, dir_fd: int | None) -> str | None:
        return None if self.own.inside else self.absolute(path, dir_fd, self.overlay.cwd)

    # Reading

    def plainly(self, path: Any, follow: bool, call: Callable[[], Any], undo: Callable[[Any], None]) -> Any:
        """Run ``call`` on the disk itself, if the rank sees the disk's content there; else return ``ELSEWHERE``."""
        if type(path) is not str:
            return ELSEWHERE
        cut = path.rfind("/") + 1
        elsewhere = self._elsewhere(path[:cut])
        if elsewhere is None or (elsewhere and (cut == len(path) or path[cut:] in elsewhere)):
            return ELSEWHERE
        try:
            # A link may lead to a path where the rank sees something else.
            result = ELSEWHERE if follow and self._is_link(path) else call()
        except OSError:
            if self.overlay.is_steady():
                raise
            return ELSEWHERE
        if result is ELSEWHERE or self.overlay.is_steady():
            return result
        undo(result)
        return ELSEWHERE

    def _is_link(self, path: str) -> bool:
        try:
            return stat.S_ISLNK(self._lstat(path).st_mode)
        except OSError:
            return False

    def _elsewhere(self, head: str) -> set[str] | None:
        if self.overlay.is_steady():
            clean = self.overlay.clean  # read once: another thread may replace it
            if head in clean:
                return clean[head]
        absolute = self._absolute(head or ".", None)
        if absolute is None:
            return None
        self.own.inside = True
        try:
            return self.overlay.learn(head, absolute)
        except OSError:
            return None  # the call itself will raise it
        finally:
            self.own.inside = False

    def reading(self, name: str, follows: bool) -> Callable[..., Any]:
        original = self.original.get(name)

        @functools.wraps(original or len)
        def call(path: Any = None, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            assert original is not None
            at = {} if dir_fd is None else {"dir_fd": dir_fd}
            if self.own.inside or isinstance(path, int):
                return original(path, *args, **at, **kwargs)
            follow = follows and kwargs.get("follow_symlinks", True)
            if not at:
                result = self.plainly(path, follow, lambda: original(path, *args, **kwargs), lambda _: None)
                if result is not ELSEWHERE:
                    return result
            given = "." if path is None else path
            try:
                key = self.key(given, dir_fd, follow)
            except OSError:
                if name == "access":  # access returns False instead of raising
                    return False
                raise
            if key is None:
                return original(path, *args, **at, **kwargs)
            encode = os.fsencode if name == "readlink" and isinstance(given, bytes) else str
            return self.inside(
                lambda: self.overlay.read(key, lambda place: original(encode(place), *args, **kwargs)), given
            )

        return call

    def _listing(
        self, name: str, made: Callable[[Any], Any], own: Callable[[str, Any, list[str]], Any]
    ) -> Callable[..., Any]:
        """Wrap ``listdir`` or ``scandir``: return ``made`` of the original's result, or ``own`` of the rank's names."""
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any = None) -> Any:
            given = "." if path is None else path
            if self.own.inside:
                return original(path)
            if not self._by_name and not isinstance(given, (int, bytes)):
                head = os.path.join(os.fspath(given), "")
                result = self.plainly(head, False, lambda: made(original(path)), lambda _: None)
                if result is not ELSEWHERE:
                    return result
            if isinstance(given, int) and not _is_open(given):
                return original(path)
            key = self.key(self.of(given) if isinstance(given, int) else given, None, follow=True)
            if key is None:
                return original(path)
            return own(key, given, self.inside(lambda: self.overlay.names(key), path))

        return call

    def listdir(self) -> Callable[..., Any]:
        def own(_: str, path: Any, names: list[str]) -> Any:
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

        return self._listing("listdir", lambda found: found, own)

    def scandir(self) -> Callable[..., Any]:
        def own(key: str, path: Any, names: list[str]) -> Any:
            return Scan([ListedEntry(self.overlay, self.inside, key, path, name) for name in names])

        def made(scan: Any) -> Any:
            with scan:  # read to the end at once, so that later changes of rank 0 are not in it
                return Scan(list(scan))

        return self._listing("scandir", made, own)


def name_in(error: OSError, path: Any, to: Any = None) -> None:
    """Put the program's paths into ``error``."""
    error.filename = os.fspath(path) if isinstance(path, os.PathLike) else path
    if to is not None or error.filename2 is not None:
        error.filename2 = os.fspath(to) if isinstance(to, os.PathLike) else to


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
