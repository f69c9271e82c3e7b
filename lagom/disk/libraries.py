"""``interpose_libraries``: redirects files that C and Rust code opens to the rank's own disk.

``Imports`` finds the slots by which a loaded library calls functions of libc, which are redirected.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import functools
import importlib.machinery
import logging
import mmap
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from lagom.disk.calls import SYSTEM, FileCalls
from lagom.patching.replace import replaced

_LIBC = ctypes.CDLL(None)
_DYNAMIC, _RELRO = 2, 0x6474E552  # kinds of program headers, of elf.h
_STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ, _PLTRELSZ, _JMPREL = 5, 6, 7, 8, 10, 2, 23  # kinds of dynamic entries
_KINDS = {"x86_64": (1, 6, 7), "aarch64": (257, 1025, 1026)}  # relocations that are the address of a function
_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("rest", "<u8", 2)])
_RELOCATION = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_HEADER = np.dtype([("kind", "<u4"), ("flags", "<u4"), ("rest", "<u8", 6)])
_HEADERS = ((ctypes.c_uint64, 32), (ctypes.c_uint16, 56))
"""Type and offset of the position and number of program headers in an ELF file."""
_NAMES = (
    "open openat creat fopen mkdir mkdirat rmdir unlink unlinkat remove rename renameat renameat2 link symlink "
    "truncate chmod stat lstat fstatat statx __xstat __lxstat __fxstatat access faccessat readlink readlinkat "
    "statfs statvfs opendir realpath"
)
FUNCTIONS = frozenset(name + end for name in _NAMES.split() for end in ("", "64"))
"""Functions of libc that take a path."""
_BEGINS = np.array([int.from_bytes(name.encode()[:4], "little") for name in FUNCTIONS], dtype="<u4")
_SYSTEM = re.compile(
    r"/(nvidia|triton|jvm)/|/lagom/_native|/(ld-linux|lib(c|m|dl|rt|pthread|resolv|nss_[^/]*|gcc_s|python[^/]*|ffi|numa|jvm|"
    r"[^/]*omp5?|cu(?!rl)[^/]*|nv[^/]*|nccl[^/]*|c10_cuda|torch_cuda[^/]*|[^/]*malloc[^/]*|.?san|[^/]*openblas[^/]*|mkl[^/]*))"
    r"(-[^/]*)?\.so"
)
"""Libraries that open no files of the program: C's own, Python, CUDA, OpenMP, BLAS, Java, allocators, lagom's own.

They must not be redirected: they open /proc and devices, also in threads that must not wait for the GIL.
"""


class Library(NamedTuple):
    """Address and file name of a loaded shared library."""

    base: int
    name: str


class Slot(NamedTuple):
    """An entry of a library's global offset table, at ``address``; it holds the address of the function ``name``."""

    name: str
    address: int
    is_read_only: bool


class _LinkMap(ctypes.Structure):
    """The first fields of ``struct link_map`` (link.h), the loader's linked list of loaded libraries."""

    _fields_ = (
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_size_t),
        ("next", ctypes.c_size_t),
    )


_UPDATING = threading.RLock()
os.register_at_fork(before=_UPDATING.acquire, after_in_parent=_UPDATING.release, after_in_child=_UPDATING.release)


class Imports:
    """Replaces libc's functions in the shared libraries that are loaded at each ``update``."""

    def __init__(self, machine: str, functions: Mapping[str, int]) -> None:
        """Take the machine's name, and the address of each replacement by the name of the function of libc.

        Raises:
            OSError: if the relocations of this machine are unknown.
        """
        if machine not in _KINDS:
            raise OSError(errno.ENOSYS, f"how libraries for {machine} import functions is not known")
        self._machine = machine
        self._functions = functions
        self._before: dict[Library, list[tuple[Slot, int]]] = {}

    def update(self) -> None:
        """Redirect the functions of libraries loaded since the last call, and forget libraries that were unloaded."""
        with _UPDATING:
            libraries = loaded()
            for gone in self._before.keys() - set(libraries):
                del self._before[gone]
            for library in libraries:
                if library not in self._before:
                    self._change(library)

    def restore(self) -> None:
        """Restore the original functions in all libraries."""
        with _UPDATING:
            for library in loaded():
                for slot, address in self._before.pop(library, ()):
                    self._set(slot, address)

    def _change(self, library: Library) -> None:
        found = [slot for slot in slots(library, self._machine) if slot.name in self._functions]
        # An address below the library's base is not filled in yet, since another thread is still loading the library.
        # Such a library is changed at the next update.
        if all(ctypes.c_size_t.from_address(slot.address).value > library.base for slot in found):
            self._before[library] = [(slot, self._set(slot, self._functions[slot.name])) for slot in found]

    def _set(self, slot: Slot, address: int) -> int:
        place = ctypes.c_size_t.from_address(slot.address)
        page = slot.address & -mmap.PAGESIZE
        protect = (ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE))
        if slot.is_read_only and _LIBC.mprotect(*protect, mmap.PROT_READ | mmap.PROT_WRITE):
            return place.value
        before, place.value = place.value, address
        if slot.is_read_only:
            _LIBC.mprotect(*protect, mmap.PROT_READ)
        return before


def loaded() -> list[Library]:
    """Return the loaded libraries of this process, from the loader's own list.

    dl_iterate_phdr could deadlock: it would call Python while it holds a lock, and an import that holds the GIL may
    wait for that lock.
    """
    libraries, address = list[Library](), _LIBC._handle
    while address:
        entry = _LinkMap.from_address(address)
        libraries.append(Library(entry.base, (entry.name or b"").decode(errors="replace")))
        address = entry.next
    return libraries


@functools.cache
def slots(library: Library, machine: str) -> tuple[Slot, ...]:
    """Return the slots of ``FUNCTIONS`` in a library; an empty tuple if it opens no files of the program."""
    if not library.name.startswith("/") or _SYSTEM.search(library.name):
        return ()
    at, num = (kind.from_address(library.base + offset).value for kind, offset in _HEADERS)
    headers = _array(library.base + at, _HEADER, num)
    dynamic = headers[headers["kind"] == _DYNAMIC]["rest"]
    if not len(dynamic):
        return ()
    entries = _array(library.base + int(dynamic[0][1]), np.dtype("<u8"), int(dynamic[0][4]) // 8)
    tags = {int(tag): int(value) for tag, value in entries.reshape(-1, 2)}
    read_only = [(int(rest[1]), int(rest[1] + rest[4])) for rest in headers[headers["kind"] == _RELRO]["rest"]]
    return tuple(
        Slot(name, library.base + offset, any(low <= offset < high for low, high in read_only))
        for table, size in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ))
        if table in tags and size in tags
        for offset, name in _imported(_array(tags[table], _RELOCATION, tags[size] // 24), tags, _KINDS[machine])
    )


def _imported(
    relocations: np.ndarray[Any, Any], tags: Mapping[int, int], kinds: tuple[int, ...]
) -> Iterator[tuple[int, str]]:
    """Yield offset and name of each relocation for a function of ``FUNCTIONS`` that another library defines."""
    symbol = relocations["info"] >> 32
    chosen = relocations[(symbol != 0) & np.isin(relocations["info"] & 0xFFFFFFFF, kinds)]
    if not len(chosen):
        return
    numbers = (chosen["info"] >> 32).astype(np.int64)
    symbols = _array(tags[_SYMTAB], _SYMBOL, int(numbers.max()) + 1)[numbers]
    text = _array(tags[_STRTAB], np.dtype("u1"), tags[_STRSZ])
    at = np.minimum(symbols["name"].astype(np.int64)[:, None] + np.arange(4), len(text) - 1)
    begins = np.ascontiguousarray(text[at]).view("<u4").ravel()
    for index in np.flatnonzero(np.isin(begins, _BEGINS) & (symbols["section"] == 0)):
        name = ctypes.string_at(tags[_STRTAB] + int(symbols["name"][index])).decode(errors="replace")
        if name in FUNCTIONS:
            yield int(chosen["offset"][index]), name


def _array(address: int, kind: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(memoryview((ctypes.c_char * (kind.itemsize * count)).from_address(address)), kind)


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
        wrappers: dict[str, tuple[int, Callable[..., Any]]] = dict(self._changing())
        if reads:
            wrappers |= {name: (at, self._looking(name, at)) for name, at in _READS.items()}
            wrappers |= {"opendir": (0, self._opendir), "realpath": (0, self._realpath)}
        made = {}
        for name, (at, function) in wrappers.items():
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
