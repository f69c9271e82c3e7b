"""``CallsOfOthers``: a rank other than 0 sees the disk through its overlay."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from typing import Any

from lagom.patching.calls import CHANGE, READ, Calls, opens_to_read
from lagom.patching.journal import Journal
from lagom.patching.listing import Entry, Scan
from lagom.patching.overlay import Overlay

_ELSEWHERE = object()


class CallsOfOthers(Calls):
    """Those of every rank that is not rank 0."""

    def __init__(self, host_dir: str, folder: str, journal: Journal, by_name: bool) -> None:
        """``folder`` is the rank's own; ``by_name``: all directories are listed by name, since hosts differ."""
        super().__init__(host_dir)
        self.overlay = Overlay(folder, journal, self.left_alone, self.downloads)
        self._by_name = by_name
        self._was_asked = False
        self._opened_directories: dict[int, tuple[str, int, int]] = {}
        self._lstat = self.original["lstat"]

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
            "getcwd": self._getcwd("getcwd", lambda cwd: cwd),
            "getcwdb": self._getcwd("getcwdb", os.fsencode),
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
        try:
            info = os.fstat(fd)
        except OSError:
            self._opened_directories.pop(fd, None)
            raise
        key, dev, ino = self._opened_directories.get(fd, ("", 0, 0))
        # Not what /proc says where it can be helped: rank 0 may have moved the directory since.
        return key if (dev, ino) == (info.st_dev, info.st_ino) else self.overlay.seen(super().of(fd))

    # What all of them do

    def inside(self, call: Callable[[], Any], path: Any, to: Any = None) -> Any:
        """``call`` with lagom's own calls reaching the disk; its exceptions name what the program named."""
        self.own.inside = True
        try:
            return call()
        except OSError as error:
            _name(error, path, to)
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
        except OSError as error:
            _name(error, path)
            raise
        finally:
            self.own.inside = False

    def _absolute(self, path: Any, dir_fd: int | None) -> str | None:
        return None if self.own.inside else self.absolute(path, dir_fd, self.overlay.cwd)

    # Reading

    def _plainly(self, path: Any, follow: bool, call: Callable[[], Any], undo: Callable[[Any], None]) -> Any:
        """``call``, on the disk itself, if what is there is what this rank sees; else ``_ELSEWHERE``."""
        if type(path) is not str:
            return _ELSEWHERE
        cut = path.rfind("/") + 1
        elsewhere = self._elsewhere(path[:cut])
        if elsewhere is None or (elsewhere and (cut == len(path) or path[cut:] in elsewhere)):
            return _ELSEWHERE
        try:
            # A link may lead to where all is not as it seems.
            result = _ELSEWHERE if follow and self._is_link(path) else call()
        except OSError:
            if self.overlay.is_steady():
                raise
            return _ELSEWHERE
        if result is _ELSEWHERE or self.overlay.is_steady():
            return result
        undo(result)
        return _ELSEWHERE

    def _is_link(self, path: str) -> bool:
        try:
            return stat.S_ISLNK(self._lstat(path).st_mode)
        except OSError:
            return False

    def _elsewhere(self, head: str) -> set[str] | None:
        if head in self.overlay.clean and self.overlay.is_steady():
            return self.overlay.clean[head]
        absolute = self._absolute(head or ".", None)
        if absolute is None:
            return None
        self.own.inside = True
        try:
            self.overlay.learn(head, absolute)
        except OSError:
            return None  # the call itself will say so
        finally:
            self.own.inside = False
        return self.overlay.clean[head]

    def _reading(self, name: str, follows: bool) -> Callable[..., Any]:
        original = self.original.get(name)

        @functools.wraps(original or len)
        def call(path: Any = None, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            assert original is not None
            at = {} if dir_fd is None else {"dir_fd": dir_fd}
            if self.own.inside or isinstance(path, int):
                return original(path, *args, **at, **kwargs)
            follow = follows and kwargs.get("follow_symlinks", True)
            if not at:
                result = self._plainly(path, follow, lambda: original(path, *args, **kwargs), lambda _: None)
                if result is not _ELSEWHERE:
                    return result
            given = "." if path is None else path
            try:
                key = self._key(given, dir_fd, follow)
            except OSError:
                if name == "access":  # the one that answers
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
        """``listdir`` or ``scandir``: what ``made`` makes of the original's result, or ``own`` of other names."""
        original = self.original[name]

        @functools.wraps(original)
        def call(path: Any = None) -> Any:
            given = "." if path is None else path
            if self.own.inside:
                return original(path)
            if not self._by_name and not isinstance(given, (int, bytes)):
                head = os.path.join(os.fspath(given), "")
                result = self._plainly(head, False, lambda: made(original(path)), lambda _: None)
                if result is not _ELSEWHERE:
                    return result
            if isinstance(given, int) and not _is_open(given):
                return original(path)
            key = self._key(self.of(given) if isinstance(given, int) else given, None, follow=True)
            if key is None:
                return original(path)
            return own(key, given, self.inside(lambda: self.overlay.names(key), path))

        return call

    def _listdir(self) -> Callable[..., Any]:
        def own(_: str, path: Any, names: list[str]) -> Any:
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

        return self._listing("listdir", lambda found: found, own)

    def _scandir(self) -> Callable[..., Any]:
        def own(key: str, path: Any, names: list[str]) -> Any:
            return Scan([Entry(self.overlay, self.inside, key, path, name) for name in names])

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
            if self.own.inside or not self._do_two(name, src, dst, kwargs):
                original(src, dst, *args, **kwargs)

        return call

    def _do_two(self, name: str, src: Any, dst: Any, kwargs: dict[str, Any]) -> bool:
        """Rename or link; False: it is none of the overlay's business."""
        overlay = self.overlay
        try:
            follow = name == "link" and kwargs.get("follow_symlinks", False)
            key = src if name == "symlink" else self._key(src, kwargs.get("src_dir_fd"), follow)
            to = self._key(dst, kwargs.get("dst_dir_fd", kwargs.get("dir_fd")), follow=False)
            if key is None or to is None:
                return False
            act = getattr(overlay, "rename" if name == "replace" else name)
            self.inside(lambda: act(key, to), src, dst)
        except OSError as error:
            _name(error, src, dst)
            raise
        return True

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
            fd = self._opened(path, flags, mode, dir_fd)
            info = os.fstat(fd)
            if stat.S_ISDIR(info.st_mode) and (key := self._key(path, dir_fd, follow=True)) is not None:
                self._opened_directories[fd] = (key, info.st_dev, info.st_ino)
            return fd

        return call

    def _io_open(self) -> Callable[..., Any]:
        original = self.original["io.open"]

        @functools.wraps(original)
        def call(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            own = self.own.inside or isinstance(file, int) or len(args) > 5 or kwargs.get("opener") is not None
            if own:
                return original(file, mode, *args, **kwargs)
            if opens_to_read(mode):
                opened = self._plainly(
                    file, True, lambda: original(file, mode, *args, **kwargs), lambda opened: opened.close()
                )
                if opened is not _ELSEWHERE:
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
                self.overlay.clean.clear()
            else:
                self._stand(key, path)

        return call

    def _fchdir(self) -> Callable[..., Any]:
        @functools.wraps(self.original["fchdir"])
        def call(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            self._stand(self.of(number), fd)

        return call

    def _getcwd(self, name: str, encoded: Callable[[str], Any]) -> Callable[..., Any]:
        original = self.original[name]

        @functools.wraps(original)
        def call() -> Any:
            return original() if self.overlay.cwd is None else encoded(self.overlay.cwd)

        return call

    def _stand(self, key: str, given: Any) -> None:
        def stand() -> None:
            place = self.overlay.place(key)
            self.original["chdir"](place)
            self.overlay.cwd = None if place == key else key
            self.overlay.clean.clear()

        self.inside(stand, given)


def _name(error: OSError, path: Any, to: Any = None) -> None:
    """Have ``error`` name what the program has named."""
    error.filename = os.fspath(path) if isinstance(path, os.PathLike) else path
    if to is not None or error.filename2 is not None:
        error.filename2 = os.fspath(to) if isinstance(to, os.PathLike) else to


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
