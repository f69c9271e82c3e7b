"""``Imports``: finds and changes the addresses of libc's functions in loaded shared libraries."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

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
    found, address = list[Library](), _LIBC._handle
    while address:
        entry = _LinkMap.from_address(address)
        found.append(Library(entry.base, (entry.name or b"").decode(errors="replace")))
        address = entry.next
    return found


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
