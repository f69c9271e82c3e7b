"""``Retention``: how many runs the default folder keeps; removes older ones, except files that are not lagom's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lagom.records.timeline import TIMELINES

ALIVE = ".alive"
"""A file in a run's folder that is locked while the run is under way."""
_NAME = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}")
_OURS = re.compile(
    r"\.?(run|result)\.json|\.alive|timeline(-summary)?\.json|progress\.jsonl|rank-\d+\.log|lagom\.log|"
    r"picture-\d+\.png|report\.html"
)
_OF_RANK = re.compile(r"rank-\d+\.jsonl")
"""A file in the folder of timelines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Limits on the runs kept; the first that is reached counts."""

    num_runs: float = 200
    num_mb: float = 500

    @classmethod
    def from_environment(cls) -> Retention:
        """Return the limits of ``LAGOM_KEEP_RUNS`` and ``LAGOM_KEEP_MB``; "inf" keeps all.

        Raises:
            ValueError: when one of them is no number.
        """
        return cls(num_runs=_number("LAGOM_KEEP_RUNS", 200), num_mb=_number("LAGOM_KEEP_MB", 500))

    def remove_older(self, top: Path) -> None:
        """Remove runs from ``top`` until the limits hold; the newest stays, and so do runs that are under way.

        The newest does not count in bytes: a large one is no reason to remove those before it.
        """
        num_runs, num_bytes = 1, 0
        for folder in sorted(filter(_is_run, top.iterdir()), reverse=True)[1:]:
            size = _size(folder)
            if num_runs >= self.num_runs or num_bytes + size > self.num_mb * 1e6:
                with contextlib.suppress(OSError), lock_run(folder):
                    shutil.rmtree(folder)
                    continue
            num_runs, num_bytes = num_runs + 1, num_bytes + size


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock the folder of a run for this process.

    Raises:
        OSError: when another process holds the lock.
    """
    lock = os.open(folder / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _is_run(folder: Path) -> bool:
    """Return whether ``folder`` is that of a run, and holds only files that lagom writes."""
    with contextlib.suppress(OSError):  # another process removes it, or another user owns it
        if _NAME.fullmatch(folder.name) and not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
            return (folder / "run.json").is_file() and all(map(_is_ours, folder.iterdir()))
    return False


def _is_ours(path: Path) -> bool:
    """Return whether lagom has written this path in a run's folder; no folder but lagom's own is searched."""
    if path.name == TIMELINES and path.is_dir() and not path.is_symlink():
        return all(_OF_RANK.fullmatch(inside.name) and _is_file(inside) for inside in path.iterdir())
    return _OURS.fullmatch(path.name) is not None and _is_file(path)


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _size(folder: Path) -> int:
    """Return the bytes of the run in ``folder``; another process may remove files meanwhile."""
    size = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            size += path.lstat().st_size
    return size


def _number(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not number >= 0:
        raise ValueError(f'the environment variable {name} is {text!r}; want a number, or "inf" to keep all')
    return number
