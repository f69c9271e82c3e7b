"""A folder that looks like another one, for programs whose files must not land."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

_SMALL = 1 << 20  # bytes; larger files are linked to
_MOST = 1 << 26  # bytes copied in all
_ENTRIES = 2000  # listed; further folders are linked to


def mirror(source: Path, target: Path) -> None:
    """Make ``target`` with the folders of ``source``, small files copied and large ones as links.

    Hidden folders, virtual environments and what is more than 2000 entries away are links themselves.
    """
    target.mkdir()
    copied = entries = 0
    pending = [(source, target)]
    while pending:
        folder, into = pending.pop(0)  # breadth first: what lies near the top is what programs name
        for entry in _listed(folder):
            entries += 1
            place = into / entry.name
            with contextlib.suppress(OSError):
                if entry.is_dir() and entries < _ENTRIES and _is_gone_through(entry):
                    place.mkdir()
                    pending.append((Path(entry.path), place))
                elif entry.is_file() and (size := entry.stat().st_size) <= _SMALL and copied + size <= _MOST:
                    shutil.copy2(entry.path, place)
                    copied += size
                else:
                    place.symlink_to(os.path.abspath(entry.path))


def _is_gone_through(folder: os.DirEntry[str]) -> bool:
    hidden = folder.name.startswith((".", "__pycache__"))
    return not (hidden or folder.is_symlink() or os.path.exists(os.path.join(folder.path, "pyvenv.cfg")))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
