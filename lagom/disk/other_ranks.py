"""``OtherRankCalls``: a rank other than 0, or rank 0 in a search or rehearsal, sees the disk through its overlay."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from lagom.disk.calls import CHANGE, READ, FileCalls, ListedEntry, Scan
from lagom.disk.journal import Journal
from lagom.disk.overlay import Overlay, copy_disk


class OtherRankCalls(FileCalls):
    """Replaces the file functions on a rank with an overlay: reads and changes go through the rank's ``Overlay``."""

    def __init__(self, host_dir: str, by_name: bool, journal: Journal, folder: str) -> None:
        """Keep the rank's own files in ``folder``."""
        super().__init__(host_dir, by_name)
        self.overlay = Overlay(folder, journal, self.left_alone, self.downloads)

    def replacements(self) -> dict[str, Any]:
        overlay = self.overlay
        functions: dict[str, Any] = {name: self._one(name, follows, overlay.read) for name, follows in READ.items()}
        functions |= {name: self._one(name, follows, overlay.change) for name, follows in CHANGE.items()}
        functions |= {name: self._one(name, False, overlay.unlink) for name in ("unlink", "remove")}
        functions |= {name: self._one(name, False, overlay.make) for name in ("mkdir", "mkfifo", "mknod")}
        functions |= {name: self._two(name, overlay.rename) for name in ("rename", "replace")}
        functions |= {
            "chdir": self._one("chdir", True, overlay.read),
            "truncate": self._one("truncate", True, overlay.truncate),
            "rmdir": self._one("rmdir", False, overlay.rmdir),
            "link": self._two("link", overlay.link),
            "symlink": self._two("symlink", overlay.symlink),
            "open": self._open(),
            "listdir": self._listing("listdir", list, self._names),
            "scandir": self._listing("scandir", _at_once, self._entries),
            "getcwd": functools.wraps(os.getcwd)(lambda: overlay.seen(self.original["getcwd"]())),
            "getcwdb": functools.wraps(os.getcwdb)(lambda: os.fsencode(os.getcwd())),
        }
        return functions | {"io.open": self.io_open(functions["open"])}

    def free(self, path: str) -> None:
        self.overlay.log.add("free", path)

    def keep(self, folder: str) -> None:
        """Copy the overlay to ``folder``, in place of an earlier copy."""
        self._inside(lambda: copy_disk(self.overlay.folder, folder), folder)

    def asked(self) -> None:
        if not self.was_asked:
            super().asked()
            with self.original["io.open"](self.overlay.folder + "/asked", "w") as file:
                file.write(str(os.getpid()))

    def path_to_read(self, path: str, dir_fd: int | None = None, follow: bool = True) -> str:
        absolute = self.absolute(path, dir_fd)
        if absolute is None:
            return path
        return str(self._inside(lambda: self.overlay.place(self.overlay.key(absolute, follow)), path))

    def listed(self, path: str) -> str:
        absolute = self.absolute(path, None)
        if absolute is None:
            return path
        return str(self._inside(lambda: self.overlay.listed(self.overlay.key(absolute, True)), path))

    def path_to_write(self, path: str) -> str:
        """Return the path of the rank's own copy of the file ``path``.

        The file is opened to append once, which makes the overlay copy it to the rank's folder.
        """
        with open(path, "ab"):
            return self.path_to_read(path)

    def of(self, fd: int) -> str:
        os.fstat(fd)  # raises the right error if the descriptor is closed
        return self.overlay.seen(super().of(fd))

    def _inside(self, call: Callable[[], Any], path: Any, to: Any = None) -> Any:
        """Run ``call`` with file functions that reach the real disk; its exceptions get the program's paths."""
        self.own.inside = True
        try:
            return call()
        except OSError as error:
            error.filename = os.fspath(path) if isinstance(path, os.PathLike) else path
            if to is not None or error.filename2 is not None:
                error.filename2 = os.fspath(to) if isinstance(to, os.PathLike) else to
            raise
        finally:
            self.own.inside = False

    def _one(self, name: str, follows: bool, act: Callable[[str, Callable[[str], Any]], Any]) -> Callable[..., Any]:
        """Wrap a function of ``os`` with one path: call ``act`` with the path's key and the original function.

        ``act`` calls the original function with the place where the file is.
        """
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any = ".", *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            absolute = self.absolute(path, dir_fd)
            if absolute is None:
                return original(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))
            follow = follows and kwargs.get("follow_symlinks", True)
            encode = os.fsencode if isinstance(path, bytes) else str

            def run() -> Any:
                return act(self.overlay.key(absolute, follow), lambda at: original(encode(at), *args, **kwargs))

            try:
                return self._inside(run, path)
            except OSError:
                if name == "access":  # it returns False instead of raising
                    return False
                raise

        return call

    def _two(self, name: str, act: Callable[[Any, str], None]) -> Callable[..., Any]:
        """Wrap a function of ``os`` with two paths: call ``act`` with their keys.

        The first path of ``symlink`` is the target of a link, and is passed as the program gave it.
        """
        original = self.original[name]

        @functools.wraps(original)
        def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            at = src if name == "symlink" else self.absolute(src, kwargs.get("src_dir_fd"))
            to = self.absolute(dst, kwargs.get("dst_dir_fd", kwargs.get("dir_fd")))
            if at is None or to is None:
                original(src, dst, *args, **kwargs)
                return

            def run() -> None:
                act(src if name == "symlink" else self.overlay.key(at, False), self.overlay.key(to, False))

            self._inside(run, src, dst)

        return call

    def _open(self) -> Callable[..., int]:
        original = self.original["open"]

        @functools.wraps(original)
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
            absolute = self.absolute(path, dir_fd)
            if absolute is None:
                return original(path, flags, mode, dir_fd=dir_fd)
            follow = not (flags & os.O_CREAT and flags & os.O_EXCL) and not flags & os.O_NOFOLLOW
            return self._inside(lambda: self.overlay.open(self.overlay.key(absolute, follow), flags, mode), path)

        return call

    # Listing

    def _listing(self, name: str, made: Callable[[Any], Any], own: Callable[[str, Any], Any]) -> Callable[..., Any]:
        """Wrap ``listdir`` or ``scandir``.

        The wrapper returns ``made`` of the original's result if the directory is the same on the real disk and names
        need not be sorted, otherwise ``own`` of the key and the given path.
        """
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any = None) -> Any:
            given = "." if path is None else path
            absolute = self.of(given) if isinstance(given, int) else self.absolute(given, None)
            if absolute is None or self.own.inside:
                return original(path)

            def is_untouched() -> bool:
                return not self.by_name and bool(self._inside(lambda: self.overlay.is_untouched(absolute), path))

            if is_untouched():
                found = made(original(path))
                if is_untouched():
                    return found
            return self._inside(lambda: own(self.overlay.key(absolute, True), given), path)

        return call

    def _names(self, key: str, path: Any) -> list[Any]:
        return [os.fsencode(name) if isinstance(path, bytes) else name for name in self.overlay.names(key)]

    def _entries(self, key: str, path: Any) -> Scan:
        return Scan([ListedEntry(key, path, name) for name in self.overlay.names(key)])


def _at_once(scan: Any) -> Scan:
    with scan:  # read all entries now, so that later changes of rank 0 are not among them
        return Scan(list(scan))
