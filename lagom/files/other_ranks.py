"""``OtherRankCalls``: a rank other than 0 sees the disk through its overlay."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from typing import Any

from lagom.files.calls import CHANGE, READ, opens_to_read
from lagom.files.seeing import ELSEWHERE, SeenFiles, name_in


class OtherRankCalls(SeenFiles):
    """The file functions of every rank other than 0."""

    was_asked = False
    """Whether the program has asked which rank it is."""

    def replacements(self) -> dict[str, Any]:
        present = self.original
        found: dict[str, Any] = {name: self.reading(name, follows) for name, follows in READ.items()}
        found |= {name: self._changing(name, follows) for name, follows in CHANGE.items()}
        found |= {name: self._two(name) for name in ("rename", "replace", "link", "symlink")}
        found |= {
            "mkdir": self._making(),
            "rmdir": self._removing("rmdir"),
            "unlink": self._removing("unlink"),
            "remove": self._removing("remove"),
            "open": self._open(),
            "io.open": self._io_open(),
            "listdir": self.listdir(),
            "scandir": self.scandir(),
            "chdir": self._chdir(),
            "fchdir": self._fchdir(),
            "getcwd": self._getcwd("getcwd", lambda cwd: cwd),
            "getcwdb": self._getcwd("getcwdb", os.fsencode),
        }
        return {name: call for name, call in found.items() if name in present}

    def free(self, path: str) -> None:
        self.overlay.log.add("free", path)

    def asked(self) -> None:
        if not self.was_asked:
            self.was_asked = True
            with self.original["io.open"](self.overlay.folder + "/asked", "w") as file:
                file.write(str(os.getpid()))

    def written(self, path: str) -> str:
        with self.original["io.open"](path, "ab", opener=self._opener):
            return self.found(path)

    # Changing

    def _changing(self, name: str, follows: bool) -> Callable[..., Any]:
        original = self.original.get(name)

        @functools.wraps(original or len)
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            assert original is not None
            key = self.key(path, dir_fd, follows and kwargs.get("follow_symlinks", True))
            if key is None:
                return original(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))

            def change() -> Any:
                real = self.overlay.goes_real(key)
                place = key if real else self.overlay.copied_up(key)
                if not place and name == "truncate":
                    place = self.overlay.place(key)  # the system will refuse it
                return original(place, *args, **kwargs) if place else None

            return self.inside(change, path)

        return call

    def _making(self) -> Callable[..., Any]:
        original = self.original["mkdir"]

        @functools.wraps(original)
        def call(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            key = self.key(path, dir_fd, follow=False)
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
            key = self.key(path, dir_fd, follow=False)
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
        """Rename or link; return False if neither path is the overlay's."""
        overlay = self.overlay
        try:
            follow = name == "link" and kwargs.get("follow_symlinks", False)
            key = src if name == "symlink" else self.key(src, kwargs.get("src_dir_fd"), follow)
            to = self.key(dst, kwargs.get("dst_dir_fd", kwargs.get("dir_fd")), follow=False)
            if key is None or to is None:
                return False
            act = getattr(overlay, "rename" if name == "replace" else name)
            self.inside(lambda: act(key, to), src, dst)
        except OSError as error:
            name_in(error, src, dst)
            raise
        return True

    # Opening

    def _opener(self, path: Any, flags: int) -> int:
        return self._opened(path, flags, 0o666, None)

    def _opened(self, path: Any, flags: int, mode: int, dir_fd: int | None) -> int:
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        key = self.key(path, dir_fd, not exclusive and not flags & os.O_NOFOLLOW)
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
            if stat.S_ISDIR(info.st_mode) and (key := self.key(path, dir_fd, follow=True)) is not None:
                self.opened_directories[fd] = (key, info.st_dev, info.st_ino)
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
                opened = self.plainly(
                    file, True, lambda: original(file, mode, *args, **kwargs), lambda opened: opened.close()
                )
                if opened is not ELSEWHERE:
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
            key = self.key(path, None, follow=True)
            if key is None:
                original(path)
                self.overlay.cwd = None
                self.overlay.clean = {}
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
            self.overlay.clean = {}

        self.inside(stand, given)
