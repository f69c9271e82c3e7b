"""``interpose_libraries``: redirects files that C and Rust code opens to the rank's own disk."""

from __future__ import annotations

import _thread
import ctypes
import errno
import functools
import importlib.machinery
import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lagom.disk.calls import SYSTEM, FileCalls
from lagom.disk.symbols import Imports
from lagom.patching.replace import replaced

log = logging.getLogger("lagom")

_AT_FDCWD, _NOFOLLOW, _REMOVEDIR = -100, 0x100, 0x200  # from fcntl.h
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_size_t] * 6, use_errno=True)
"""Type of a function of libc with up to six arguments of one machine word; libc ignores additional arguments."""
_READS = {"stat": 0, "access": 0, "statfs": 0, "statvfs": 0, "__xstat": 1, "fstatat": 1, "faccessat": 1, "statx": 1}
_READS |= {"lstat": 0, "readlink": 0, "__lxstat": 1, "readlinkat": 1, "__fxstatat": 2}
"""Functions that only read a path, and the index of the argument with the path."""
_FLAGS = {"fstatat": 3, "faccessat": 3, "statx": 2, "__fxstatat": 4}
"""Functions with an argument of flags, which may contain ``_NOFOLLOW``, and the index of this argument."""
_AT = frozenset((*_FLAGS, "readlinkat"))
"""Functions with a descriptor, before the path, of the directory to which a relative path refers."""
_OF_LINKS = frozenset(("lstat", "readlink", "__lxstat", "readlinkat"))
"""Functions that do not follow a link at the path."""
_MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND}

_kept: list[object] = []
"""Replacements that stay alive after ``restore``, since a thread in C code may still run one."""


@contextmanager
def interpose_libraries(calls: FileCalls, *, reads: bool) -> Iterator[None]:
    """Make shared libraries, also libraries loaded later, call Python's file functions instead of libc's.

    See Note [Files of C code]. The environment variable LAGOM_C_FILES=0 leaves libraries alone. Libraries also stay as
    they are on an unknown processor or libc.

    Args:
        reads: whether functions that only read a path are replaced too, so that they find the files of ``calls``.
    """
    if os.environ.get("LAGOM_C_FILES") == "0":
        yield
        return
    with ExitStack() as stack:
        try:
            functions = _Functions(calls).by_name(reads)
            imports = Imports(platform.machine(), {name: _address(one) for name, one in functions.items()})
            _kept.append(functions)
            stack.callback(imports.restore)
            imports.update()
        except (KeyError, OSError, AttributeError, ImportError, MemoryError) as error:
            # The processor or the libc is unknown, or the system does not let C code call functions of Python.
            if not reads:
                told = "files that C code (torch.jit, h5py, sqlite) opens are on the real disk of every rank: %s: %s"
                log.warning(told, type(error).__name__, error)
        else:
            for owner, name in ((importlib.machinery.ExtensionFileLoader, "create_module"), (ctypes.CDLL, "__init__")):
                stack.enter_context(replaced(owner, name, _then(vars(owner)[name], imports.update)))
        yield


def _then(original: Callable[..., Any], update: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        update()
        return result

    return call


class _Functions:
    """Functions that libraries call instead of libc's; each argument is one machine word, a number or an address."""

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.fdopen.restype = self._libc.malloc.restype = ctypes.c_size_t
        self._libc.malloc.argtypes = (ctypes.c_size_t,)

    def by_name(self, reads: bool) -> dict[str, Any]:
        """Return the functions that this libc has, in a form that C code can call."""
        found: dict[str, tuple[int, Callable[..., Any]]] = dict(self._changing())
        if reads:
            found |= {name: (at, self._looking(name, at)) for name, at in _READS.items()}
            found |= {"opendir": (0, self._opendir), "realpath": (0, self._realpath)}
        made = {}
        for name, (at, function) in found.items():
            for variant in (name, name + "64"):
                if hasattr(self._libc, variant):
                    made[variant] = self._made(variant, at, function)
        return made

    def _made(self, name: str, at: int, function: Callable[..., Any]) -> Any:
        """Return a C function that calls ``function`` with libc's original and the arguments.

        ``at`` is the index of the path among the arguments.

        Calls without a path, for system files, and of lagom itself go to the original.
        """
        original = _FUNCTION(_address(getattr(self._libc, name)))
        failed = 0 if name.startswith(("fopen", "opendir", "realpath")) else -1

        def call(*words: int) -> int:
            if self._calls.own.inside or not words[at] or _text(words[at]).startswith(SYSTEM):
                return int(original(*words))
            try:
                return function(original, *words) or 0
            except OSError as error:
                ctypes.set_errno(error.errno or errno.EIO)
                return failed
            except KeyboardInterrupt:  # no exception can pass through C code, so raise it again in the main thread
                _thread.interrupt_main()
                ctypes.set_errno(errno.EINTR)
                return failed
            except Exception as error:
                log.warning("%s of C code reaches the real disk: %s: %s", name, type(error).__name__, error)
                return int(original(*words))

        return _FUNCTION(call)

    # Each function below receives libc's original and six words, of which it uses as many as libc's function takes.

    def _changing(self) -> Iterator[tuple[str, tuple[int, Callable[..., Any]]]]:
        yield "open", (0, lambda _, path, *rest: self._open(path, *rest))
        yield "openat", (1, lambda _, at, path, *rest: self._open(path, *rest, at=at))
        yield "creat", (0, lambda _, path, mode, *rest: self._open(path, _MODES["w"], mode))
        yield "fopen", (0, lambda _, path, mode, *rest: self._fopen(path, _text(mode)))
        yield "mkdir", (0, lambda _, path, mode, *rest: os.mkdir(_text(path), mode & 0o7777))
        yield "mkdirat", (1, lambda _, at, path, mode, *rest: os.mkdir(_text(path), mode & 0o7777, dir_fd=_fd(at)))
        yield "rmdir", (0, lambda _, path, *rest: os.rmdir(_text(path)))
        yield "unlink", (0, lambda _, path, *rest: os.unlink(_text(path)))
        yield "unlinkat", (1, lambda _, at, path, flags, *rest: _remove(_text(path), flags & _REMOVEDIR, _fd(at)))
        yield "remove", (0, lambda _, path, *rest: _remove(_text(path), _is_directory(_text(path))))
        yield "rename", (0, lambda _, path, to, *rest: os.rename(_text(path), _text(to)))
        yield "renameat", (1, lambda _, at, path, to_at, to, *rest: _rename(at, path, to_at, to))
        yield "renameat2", (1, lambda _, at, path, to_at, to, flags, *rest: _rename(at, path, to_at, to, flags))
        yield "link", (0, lambda _, path, to, *rest: os.link(_text(path), _text(to)))
        yield "symlink", (1, lambda _, to, path, *rest: os.symlink(_text(to), _text(path)))
        yield "truncate", (0, lambda _, path, length, *rest: os.truncate(_text(path), length))
        yield "chmod", (0, lambda _, path, mode, *rest: os.chmod(_text(path), mode & 0o7777))

    def _open(self, path: int, flags: int, mode: int, *_: int, at: int | None = None) -> int:
        at_fd = None if at is None else _fd(at)
        return _inherited(
            os.open(_text(path), flags & 0x7FFFFFFF, mode & 0o7777, dir_fd=at_fd), not flags & os.O_CLOEXEC
        )

    def _fopen(self, path: int, mode: str) -> int:
        flags = _MODES[mode[0]]
        if "+" in mode:
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        fd = _inherited(os.open(_text(path), flags | (os.O_EXCL if "x" in mode else 0), 0o666), "e" not in mode)
        stream: int = self._libc.fdopen(fd, mode.encode())
        return stream

    def _looking(self, name: str, at: int) -> Callable[..., Any]:
        def look(original: Callable[..., int], *words: int) -> int:
            at_fd = _fd(words[at - 1]) if name in _AT else None
            follow = name not in _OF_LINKS and not (name in _FLAGS and words[_FLAGS[name]] & _NOFOLLOW)
            place = ctypes.create_string_buffer(os.fsencode(self._calls.path_to_read(_text(words[at]), at_fd, follow)))
            return original(*words[:at], ctypes.addressof(place), *words[at + 1 :])

        return look

    def _opendir(self, original: Callable[..., int], path: int, *rest: int) -> int:
        place = ctypes.create_string_buffer(os.fsencode(self._calls.listed(_text(path))))
        return original(ctypes.addressof(place), *rest)

    def _realpath(self, original: Callable[..., int], path: int, target: int, *rest: int) -> int:
        found = _text(path)
        if self._calls.path_to_read(found) == found:
            return original(path, target, *rest)
        text = os.fsencode(os.path.realpath(found, strict=True)) + b"\0"
        target = target or self._libc.malloc(len(text))
        ctypes.memmove(target, text, len(text))
        return target


def _text(address: int) -> str:
    return os.fsdecode(ctypes.string_at(address))


def _fd(word: int) -> int | None:
    number = ctypes.c_int(word).value
    return None if number == _AT_FDCWD else number


def _inherited(fd: int, inheritable: bool) -> int:
    """Make ``fd`` inheritable or not, and return it: ``os.open`` makes descriptors that are not inheritable."""
    os.set_inheritable(fd, inheritable)
    return fd


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _remove(path: str, directory: int | bool, at: int | None = None) -> None:
    (os.rmdir if directory else os.unlink)(path, dir_fd=at)


def _rename(at: int, path: int, to_at: int, to: int, flags: int = 0) -> None:
    if flags & 0xFFFFFFFF:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as on a file system that does not support the flag
    os.rename(_text(path), _text(to), src_dir_fd=_fd(at), dst_dir_fd=_fd(to_at))


# Note [Files of C code]
# h5py, pyarrow, sqlite, tokenizers and other code that is not Python opens files by functions of libc, and does not use
# the functions of Python that lagom replaces. A shared library calls libc through a table of addresses in its own
# memory, which the loader fills in (the global offset table). While the rank has its own disk, the table has addresses
# of functions that call Python's `os`. So C code of any library has the same disk as Python. Libraries that are loaded
# later are changed when Python has loaded them. lagom leaves two kinds of libraries alone: libraries that open only
# devices and /proc, and Python itself, whose functions are replaced already.
#
# A redirected call of C code must wait for the GIL. If C code held the GIL and waited for a thread of its own that
# opens a file, both would wait for ever. No such code is known; LAGOM_C_FILES=0 would be the remedy.
#
# This does not reach a library that is linked into Python itself (sqlite, in some builds), code that calls the kernel
# without libc (Go, and Rust's rustix, by which safetensors renames: see `_place_safetensors` in saving.py), and other
# programs.
