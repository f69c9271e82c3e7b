"""``FileChanges``: wraps the functions of ``os``, and tells of each change that a program makes to the disk."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

_CHANGING = (
    *("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "truncate", "mkfifo", "mknod"),
    *("utime", "chmod", "chown", "lchown", "setxattr", "removexattr"),
)
_SYSTEM = ("/dev/", "/proc/", "/sys/", os.path.join(tempfile.gettempdir(), "pymp-"))
"""Devices and the like; and multiprocessing's folders outside lagom's folder, which loader workers make."""
_PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
"""Audit events of the start of another program, which may change any file."""


class FileChanges:
    """Tells of a program's changes to files, also in caches, but not below /dev, /proc, /sys and lagom's own folder.

    Args:
        host_dir: folder of lagom's own files, where torch's C code writes for lagom.
    """

    def __init__(self, host_dir: str) -> None:
        self._left_alone = (*_SYSTEM, f"{host_dir}/", f"{os.path.realpath(host_dir)}/")
        self.rewrites: Callable[[], None] = lambda: None
        """Called before each change but an append."""
        self.appends: Callable[[str, bool], None] = lambda path, is_new: None
        """Called when a file was opened for appending, with its path on the disk and whether the file is new."""

    def noticed(self, new: Mapping[str, Any], is_own: Callable[[], bool], original: Any) -> dict[str, Any]:
        """Return the functions ``new`` and others of ``os``, wrapped so that they tell of the program's changes.

        From now on, each start of another program counts as a change as well.

        Args:
            new: replacements of functions of ``os``, and of ``io.open``, by name.
            is_own: returns whether lagom itself calls.
            original: the original functions, by name.
        """

        def audit(event: str, values: tuple[Any, ...]) -> None:
            if event in _PROGRAMS and not is_own():
                self.rewrites()

        sys.addaudithook(audit)
        found = dict(new)
        for name in _CHANGING:
            if name in original:
                found[name] = self._changing(new.get(name, original[name]), is_own)
        readlink = original["readlink"]
        found["open"] = self._opening(new["open"], lambda flags, *_, **__: _kind_of_flags(flags), is_own, readlink)
        found["io.open"] = self._opening(
            new["io.open"], lambda mode="r", *_, **__: _kind_of_mode(mode), is_own, readlink
        )
        return found

    def _changing(self, call: Callable[..., Any], is_own: Callable[[], bool]) -> Callable[..., Any]:
        @functools.wraps(call)
        def changed(*args: Any, **kwargs: Any) -> Any:
            if not is_own() and not (args and self._is_left_alone(args[0])):
                self.rewrites()
            return call(*args, **kwargs)

        return changed

    def _opening(
        self, call: Callable[..., Any], kind_of: Callable[..., str], is_own: Callable[[], bool], readlink: Any
    ) -> Callable[..., Any]:
        @functools.wraps(call)
        def opened(*args: Any, **kwargs: Any) -> Any:
            path: Any = args[0] if args else kwargs.get("file", kwargs.get("path"))
            others = {name: value for name, value in kwargs.items() if name not in ("file", "path")}
            kind = kind_of(*args[1:], **others) if len(args) > 1 or others else "r"
            if kind == "r" or is_own() or isinstance(path, int) or self._is_left_alone(path):
                return call(*args, **kwargs)
            is_new = kind == "a" and not os.path.exists(path)
            if kind != "a":
                self.rewrites()
            result = call(*args, **kwargs)
            if kind == "a":
                fd = result if isinstance(result, int) else result.fileno()
                self.appends(readlink(f"/proc/self/fd/{fd}"), is_new)
            return result

        return opened

    def _is_left_alone(self, path: Any) -> bool:
        try:
            return os.fsdecode(path).startswith(self._left_alone)
        except TypeError:
            return False


def _kind_of_flags(flags: int) -> str:
    if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        return "r"
    return "a" if flags & os.O_APPEND and not flags & (os.O_TRUNC | os.O_RDWR) else "w"


def _kind_of_mode(mode: Any) -> str:
    if not isinstance(mode, str) or not set(mode) & set("wxa+"):
        return "r"
    return "a" if "a" in mode and "+" not in mode else "w"
