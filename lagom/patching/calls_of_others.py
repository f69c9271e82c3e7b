"""``CallsOfOthers``: a rank other than 0 sees the disk through its overlay."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from lagom.patching.calls import CHANGE, READ, Calls, opens_to_read
from lagom.patching.journal import Journal
from lagom.patching.listing import Entry, Scan
from lagom.patching.overlay import Overlay


class CallsOfOthers(Calls):
    """Those of every rank that is not rank 0."""

    def __init__(self, host_dir: str, folder: str, journal: Journal, alone: bool) -> None:
        """``folder`` is the rank's own; ``alone``: rank 0 has another disk, and may list directories otherwise."""
        super().__init__(host_dir)
        self.overlay = Overlay(folder, journal, self.left_alone, self.downloads)
        self._alone_here = alone
        self._was_asked = False

    def replacements(self) -> dict[str, Any]:
        present = self.original
        found: dict[str, Any] = {name: self._reading(name, follows) for name, follows in READ.items()}
        found |= {name: self._changing(name, follows) for name, follows in CHANGE.items()}
        found |= {name: self._two(name) for name in ("rename", "replace", "link", "symlink")}
        found |= {
            "mkdir": self._making(),
            "rmdir": self._removing("rmdir"),
            "unlink": self._removing("unlink"),
            "remove": self._removing("remove"),
            "open": self._open(),
            "io.open": self._io_open(),
            "listdir": self._listdir(),
            "scandir": self._scandir(),
            "chdir": self._chdir(),
            "fchdir": self._fchdir(),
            "getcwd": lambda: self.overlay.cwd or present["getcwd"](),
            "getcwdb": lambda: os.fsencode(self.overlay.cwd) if self.overlay.cwd else present["getcwdb"](),
        }
        return {name: call for name, call in found.items() if name in present}

    def free(self, path: str) -> None:
        self.overlay.log.add("free", path)

    def asked(self) -> None:
        if not self._was_asked:
            self._was_asked = True
            with self.original["io.open"](self.overlay.folder + "/asked", "w") as file:
                file.write(str(os.getpid()))

    def written(self, path: str) -> str:
        with self.original["io.open"](path, "ab", opener=self._opener):
            return self.found(path)

    def found(self, path: str) -> str:
        key = self._key(path, None, follow=True)
        return path if key is None else self.inside(lambda: self.overlay.place(key), path)

    def of(self, fd: int) -> str:
        return self.overlay.seen(self.original["readlink"](f"/proc/self/fd/{fd}"))

    # What all of them do

    def inside(self, call: Callable[[], Any], path: Any, to: Any = None) -> Any:
        """``call`` with lagom's own calls reaching the disk; its exceptions name what the program named."""
        self.own.inside = True
        try:
            return call()
        except OSError as error:
            error.filename = path
            if to is not None or error.filename2 is not None:
                error.filename2 = to
            raise
        finally:
            self.own.inside = False

    def _key(self, path: Any, dir_fd: int | None, follow: bool) -> str | None:
        """What the overlay knows ``path`` by; None: the call is none of its business."""
        absolute = self._absolute(path, dir_fd)
        if absolute is None:
            return None
        self.own.inside = True
        try:
            return self.overlay.key(absolute, follow)
        finally:
            self.own.inside = False

    def _absolute(self, path: Any, dir_fd: int | None) -> str | None:
        return None if self.own.inside else self.absolute(path, dir_fd, self.overlay.cwd)

    def _quick(self, call: Callable[[], Any], undo: Callable[[Any], None] = lambda _: None) -> tuple[bool, Any]:
        """Try the disk itself, as long as nobody has changed anything; whether that held, and the result."""
        if not self.overlay.idle():
            return False, None
        try:
            result = call()
        except OSError:
            if self.overlay.idle():
                raise
            return False, None
        if self.overlay.idle():
            return True, result
        undo(result)
        return False, None

    # Reading

    def _reading(self, name: str, follows: bool) -> Callable[..., Any]:
        original = self.original.get(name)

        @functools.wraps(original or len)
        def call(path: Any = None, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            at = {} if dir_fd is None else {"dir_fd": dir_fd}
            assert original is not None
            if self.own.inside or isinstance(path, int):
                return original(path, *args, **at, **kwargs)
            done, result = self._quick(lambda: original(path, *args, **at, **kwargs))
            if done:
                return result
            given = "." if path is None else path
            key = self._key(given, dir_fd, follows and kwargs.get("follow_symlinks", True))
            if key is None:
                return original(path, *args, **at, **kwargs)
            encode = os.fsencode if name == "readlink" and isinstance(given, bytes) else str
            return self.inside(
                lambda: self.overlay.read(key, lambda place: original(encode(place), *args, **kwargs)), given
            )

        return call

    def _directory(self, path: Any) -> str | None:
        """The key of a directory to be listed, unless it is as it seems."""
        try:
            absolute = self.of(path) if isinstance(path, int) else self._absolute("." if path is None else path, None)
        except OSError:
            return None
        key = None if absolute is None else self._key(absolute, None, follow=True)
        if key is None or absolute is None:
            return None
        # Only without links in its path, which may be other ones than on the disk.
        is_plain = os.path.normpath(absolute) == key and self.overlay.cwd is None
        return None if is_plain and self.overlay.is_untouched(key) and not self._alone_here else key

    def _listing(self, name: str, made: Callable[[Any], Any], own: Callable[[str, Any, list[str]], Any]) -> Any:
        """``listdir`` or ``scandir``: what ``made`` makes of the original's result, or ``own`` of other names."""
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any = None) -> Any:
            if self.own.inside:
                return original(path)
            if self._directory(path) is None:
                try:
                    found = made(original(path))
                except OSError:
                    if self._directory(path) is None:
                        raise
                else:
                    if self._directory(path) is None:
                        return found
            key = self._directory(path)
            if key is None:
                return made(original(path))
            return own(key, path, self.inside(lambda: self.overlay.names(key), path))

        return call

    def _listdir(self) -> Callable[..., Any]:
        def own(_: str, path: Any, names: list[str]) -> Any:
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

        return self._listing("listdir", lambda found: found, own)

    def _scandir(self) -> Callable[..., Any]:
        def own(key: str, path: Any, names: list[str]) -> Any:
            given = "." if path is None else path
            return Scan([Entry(self.overlay, self.inside, key, given, name) for name in names])

        def made(scan: Any) -> Any:
            with scan:  # to its end at once, so that what rank 0 does later is not in it
                return Scan(list(scan))

        return self._listing("scandir", made, own)

    # Changing

    def _changing(self, name: str, follows: bool) -> Callable[..., Any]:
        original = self.original.get(name)

        @functools.wraps(original or len)
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            assert original is not None
            key = self._key(path, dir_fd, follows and kwargs.get("follow_symlinks", True))
            if key is None:
                return original(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))

            def change() -> Any:
                real = self.overlay.goes_real(key)
                place = key if real else self.overlay.copied_up(key)
                if not place and name == "truncate":
                    place = self.overlay.place(key)  # for the system to refuse
                return original(place, *args, **kwargs) if place else None

            return self.inside(change, path)

        return call

    def _making(self) -> Callable[..., Any]:
        original = self.original["mkdir"]

        @functools.wraps(original)
        def call(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            key = self._key(path, dir_fd, follow=False)
            if key is None:
                original(path, mode, dir_fd=dir_fd)
            else:
                self.inside(lambda: self.overlay.mkdir(key, mode), path)

        return call

    def _removing(self, name: str) -> Callable[..., Any]:
        original = self.original[name]
        remove = self.overlay.rmdir if name == "rmdir" else self.overlay.unlink

        @functools.wraps(original)
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            key = self._key(path, dir_fd, follow=False)
            if key is None:
                original(path, dir_fd=dir_fd)
            else:
                self.inside(lambda: remove(key), path)

        return call

    def _two(self, name: str) -> Callable[..., Any]:
        original = self.original[name]

        @functools.wraps(original)
        def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            to = self._key(dst, kwargs.get("dst_dir_fd", kwargs.get("dir_fd")), follow=False)
            if to is None:
                original(src, dst, *args, **kwargs)
                return
            if name == "symlink":
                self.inside(lambda: self.overlay.symlink(src, to), src, dst)
                return
            follow = name == "link" and kwargs.get("follow_symlinks", False)
            key = self._key(src, kwargs.get("src_dir_fd"), follow)
            if key is None:
                original(src, dst, *args, **kwargs)
                return
            act = self.overlay.link if name == "link" else self.overlay.rename
            self.inside(lambda: act(key, to), src, dst)

        return call

    # Opening

    def _opener(self, path: Any, flags: int) -> int:
        return self._opened(path, flags, 0o666, None)

    def _opened(self, path: Any, flags: int, mode: int, dir_fd: int | None) -> int:
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        key = self._key(path, dir_fd, not exclusive and not flags & os.O_NOFOLLOW)
        if key is None:
            fd: int = self.original["open"](path, flags, mode, dir_fd=dir_fd)
            return fd
        opened: int = self.inside(lambda: self.overlay.open(key, flags, mode), path)
        return opened

    def _open(self) -> Callable[..., Any]:
        original = self.original["open"]

        @functools.wraps(original)
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            return self._opened(path, flags, mode, dir_fd)

        return call

    def _io_open(self) -> Callable[..., Any]:
        original = self.original["io.open"]

        @functools.wraps(original)
        def call(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            own = self.own.inside or isinstance(file, int) or len(args) > 5 or kwargs.get("opener") is not None
            if own:
                return original(file, mode, *args, **kwargs)
            if opens_to_read(mode):
                done, opened = self._quick(lambda: original(file, mode, *args, **kwargs), lambda file: file.close())
                if done:
                    return opened
            return original(file, mode, *args, **kwargs | {"opener": self._opener})

        return call

    # The working directory

    def _chdir(self) -> Callable[..., Any]:
        original = self.original["chdir"]

        @functools.wraps(original)
        def call(path: Any) -> None:
            if isinstance(path, int):
                self._stand(self.of(path), path)
                return
            key = self._key(path, None, follow=True)
            if key is None:
                original(path)
                self.overlay.cwd = None
            else:
                self._stand(key, path)

        return call

    def _fchdir(self) -> Callable[..., Any]:
        @functools.wraps(self.original["fchdir"])
        def call(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            self._stand(self.of(number), fd)

        return call

    def _stand(self, key: str, given: Any) -> None:
        def stand() -> None:
            place = self.overlay.place(key)
            self.original["chdir"](place)
            self.overlay.cwd = None if place == key else key

        self.inside(stand, given)
