"""``FileCalls``: replacements for functions of ``os`` and ``io``, common to rank 0 and the other ranks."""

from __future__ import annotations

import functools
import io
import os
import stat
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

READ = {"stat": True, "lstat": False, "access": True, "readlink": False, "statvfs": True}
READ |= {"getxattr": True, "listxattr": True}
"""Functions that read a path, and whether they follow links by default."""
CHANGE = {"chmod": True, "chown": True, "lchown": False, "utime": True, "truncate": True}
CHANGE |= {"setxattr": True, "removexattr": True}
"""Functions that change the file or directory at a path, and whether they follow links by default."""

SYSTEM = ("/dev/", "/proc/", "/sys/")
_CACHES = (
    "XDG_CACHE_HOME",
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_KERNEL_CACHE_PATH",
    "TRITON_HOME",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_CACHE",
    "MPLCONFIGDIR",
    "PYTHONPYCACHEPREFIX",
)
"""Environment variables with the folders of caches. Every rank uses the real folder, since libraries lock caches."""


class _Own(threading.local):
    inside = False
    """Whether lagom itself calls file functions in this thread: these calls reach the real disk."""
    downloads = 0
    """Depth of ``downloading`` blocks in this thread."""


class FileCalls(ABC):
    """Replaces the file functions of one rank: functions of ``os``, and ``io.open``."""

    was_asked = False
    """Whether the program has asked which rank it is."""
    is_over = False
    """Whether the rank now sees the real disk, after ``share_disk``."""

    def __init__(self, host_dir: str, by_name: bool) -> None:
        """Take the run's folder on the host; with ``by_name``, directories are listed in order of names.

        Ranks on several hosts need ``by_name``, since each host's file system lists a directory in another order.
        """
        self.own = _Own()
        self.original: dict[str, Any] = {name: getattr(os, name) for name in _names() if hasattr(os, name)}
        self.original["io.open"] = io.open
        self.by_name = by_name
        self._alone = _left_alone()
        self._host_dir = os.path.realpath(host_dir) + "/"
        self._files = self._host_dir + "files/"  # the ranks' working directory, if the host lacks the driver's

    @abstractmethod
    def replacements(self) -> dict[str, Any]:
        """Return the replacements by name: a function of ``os`` has its plain name, and ``io.open`` is "io.open"."""

    @abstractmethod
    def free(self, path: str) -> None:
        """Let this rank use the real ``path``, such as a temporary file of its own, and all paths below it."""

    @abstractmethod
    def path_to_write(self, path: str) -> str:
        """Return the place where C code must write the file that the program calls ``path``; may raise an OSError."""

    def path_to_read(self, path: str, dir_fd: int | None = None, follow: bool = True) -> str:
        """Return the place where C code must look for the path that the program calls ``path``.

        ``follow`` tells whether a link at the path is followed.
        """
        return path

    def listed(self, path: str) -> str:
        """Return the place where C code must list the directory that the program calls ``path``."""
        return path

    def asked(self) -> None:
        """Note that the program has asked which rank it is."""
        self.was_asked = True

    def io_open(self, opened: Callable[[Any, int, int], int]) -> Callable[..., Any]:
        """Wrap ``io.open`` so that it opens files by ``opened``, which takes path, flags and mode as ``os.open``."""
        original = self.original["io.open"]

        @functools.wraps(original)
        def call(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if self.own.inside or isinstance(file, int) or len(args) > 5 or kwargs.get("opener") is not None:
                return original(file, mode, *args, **kwargs)
            return original(file, mode, *args, **kwargs | {"opener": lambda path, flags: opened(path, flags, 0o666)})

        return call

    def left_alone(self, key: str) -> bool:
        """Return whether every rank uses the real file at ``key``: a device, a cache, or a file of lagom's own.

        After ``share_disk`` this holds for all files.
        """
        path = key + "/"
        if self.is_over:
            return True
        if path.startswith(self._host_dir):
            return not path.startswith(self._files)
        return path.startswith(self._alone) or "/__pycache__/" in path

    @contextmanager
    def downloading(self) -> Iterator[None]:
        """Write the files of the block to the real disk, where all ranks of the host see them."""
        self.own.downloads += 1
        try:
            yield
        finally:
            self.own.downloads -= 1

    def downloads(self) -> bool:
        """Return whether this thread is in a ``downloading`` block."""
        return self.own.downloads > 0

    def absolute(self, path: Any, dir_fd: int | None) -> str | None:
        """Return the absolute path as text; None if the call must go to the real disk.

        That is so for calls of lagom's own, for descriptors, for invalid paths, and below /dev, /proc and /sys.
        """
        if self.own.inside:
            return None
        if type(path) is not str:
            if isinstance(path, int):
                return None
            try:
                path = os.fsdecode(path)
            except TypeError:
                return None
        if not path.startswith("/"):
            if not path:
                return None
            try:
                path = f"{os.getcwd() if dir_fd is None else self.of(dir_fd)}/{path}"
            except OSError:
                return None
        return None if path.startswith(SYSTEM) or "\0" in path else path

    def of(self, fd: int) -> str:
        """Return the path by which the program knows an open directory."""
        path: str = self.original["readlink"](f"/proc/self/fd/{fd}")
        return path

    def named_temporarily(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of ``tempfile``: a file or folder in the default folder is made on the real disk."""

        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if self.own.inside or not _by_default(make, args, kwargs):
                return make(*args, **kwargs)
            self.own.inside = True
            try:
                result = make(*args, **kwargs)
                self.free(os.path.realpath(os.fsdecode(result[1] if isinstance(result, tuple) else result)))
                return result
            finally:
                self.own.inside = False

        return made


def _by_default(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # tempfile._mkstemp_inner(dir, prefix, suffix, ...) and mkdtemp(suffix=None, prefix=None, dir=None).
    at = 0 if make.__name__ == "_mkstemp_inner" else 2
    folder = kwargs.get("dir", args[at] if len(args) > at else None)
    return folder is None or os.fsdecode(folder) == tempfile.gettempdir()


def _left_alone() -> tuple[str, ...]:
    home = os.path.expanduser("~")
    folders = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    folders += [f"{home}/.cache", f"{home}/.triton", f"{home}/.nv"]
    both = {path for folder in folders for path in (os.path.abspath(folder), os.path.realpath(folder))}
    temporary = os.path.realpath(tempfile.gettempdir())
    return (*SYSTEM, *(path + "/" for path in sorted(both)), f"{temporary}/torchinductor_")


def _names() -> tuple[str, ...]:
    others = ("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "mkfifo", "mknod")
    return (*others, *READ, *CHANGE, "listdir", "scandir", "chdir", "getcwd", "getcwdb")


class Scan:
    """The result of ``os.scandir``: an iterator over entries that can be closed."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the remaining entries."""
        self._entries = iter(())


class ListedEntry:
    """A replacement for ``os.DirEntry``, of which Python code cannot create instances."""

    def __init__(self, directory: str, given: Any, name: str) -> None:
        """Make the entry ``name`` of the absolute path ``directory``, which the program gave as ``given``."""
        self._path = os.path.join(directory, name)
        self.name: Any = os.fsencode(name) if isinstance(given, bytes) else name
        self.path: Any = self.name if isinstance(given, int) else os.path.join(given, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the result of ``os.stat``."""
        return os.stat(self._path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """Return the inode of the entry itself, without following a link."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether the entry is a directory."""
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether the entry is a regular file."""
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        """Return whether the entry is a symbolic link."""
        return stat.S_ISLNK(self._mode(False))

    def is_junction(self) -> bool:
        """Return False: junctions exist on Windows only."""
        return False

    def _mode(self, follow_symlinks: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0
