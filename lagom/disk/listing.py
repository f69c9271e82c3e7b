"""``Scan`` and ``ListedEntry``: the result of ``os.scandir`` if it is sorted, or differs from the real directory's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any


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
