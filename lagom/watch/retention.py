"""``Retention``: limits the runs in the default folder, by the removal of older ones.

Runs with files of the user, or with snapshots to go on from, stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lagom.restart.kept_snapshots import FOLDER, RESULT
from lagom.run_folder import RunFolder
from lagom.watch.spans import TIMELINES

ALIVE = ".alive"
"""A file in a run's folder that is locked while the run is under way."""
_NAME = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}")
_REPLACED = r"(run|result)\.json|picture-\d+\.png|report\.html"
"""Names of files that are replaced as a whole; a process that is killed meanwhile leaves the new file."""
_OURS = re.compile(
    rf"{_REPLACED}|\.({_REPLACED})(\.[0-9a-f]{{8}})?|\.alive|timeline(-summary)?\.json|progress\.jsonl|rank-\d+\.log|"
    r"lagom\.log"
)
_PICKLES = f"call|settings|{RESULT}"
_INSIDE = {
    re.compile(rf"{TIMELINES}(-lost-\d+)?"): re.compile(r"rank-\d+\.jsonl"),
    re.compile(FOLDER): re.compile(rf"{_PICKLES}|\.({_PICKLES})\.[0-9a-f]{{8}}|\.lock|(files|calls)\.jsonl"),
}
"""For names of folders in a run's folder, the names of the files in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Limits on the runs that are kept; the limit that is reached first counts."""

    num_runs: float = 200
    num_mb: float = 500

    @classmethod
    def from_environment(cls) -> Retention:
        """Return the limits of ``LAGOM_KEEP_RUNS`` and ``LAGOM_KEEP_MB``; "inf" keeps all.

        Raises:
            ValueError: when one of them is no number, or negative.
        """
        return cls(num_runs=_number("LAGOM_KEEP_RUNS", 200), num_mb=_number("LAGOM_KEEP_MB", 500))

    def remove_older(self, top: Path) -> None:
        """Remove each run from ``top`` with which the newer ones that stay would exceed a limit.

        The newest run and runs that are under way stay; so do runs with other files than lagom's, and runs with
        snapshots to go on from, which do not count. The newest run does not count in bytes: a large one is no reason to
        remove the runs before it.
        """
        num_runs, num_bytes = 1, 0
        sizes = ((folder, _size_of_run(folder)) for folder in sorted(_named_as_runs(top), reverse=True))
        for folder, size in [(folder, size) for folder, size in sizes if size is not None][1:]:
            if num_runs >= self.num_runs or num_bytes + size > self.num_mb * 1e6:
                with contextlib.suppress(OSError), lock_run(RunFolder.open(folder)):
                    shutil.rmtree(folder)
                    continue
            num_runs, num_bytes = num_runs + 1, num_bytes + size


@contextmanager
def lock_run(folder: RunFolder) -> Iterator[None]:
    """Lock the folder of a run for this process.

    Raises:
        OSError: when another process holds the lock.
    """
    lock = folder.open_file(ALIVE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def is_under_way(folder: RunFolder) -> bool:
    """Return whether a process holds the lock of the run in ``folder``; False if this user may not look."""
    try:
        lock = folder.open_file(ALIVE, os.O_RDWR if folder.is_own else os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if folder.is_own else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def _named_as_runs(top: Path) -> Iterator[Path]:
    """Yield the folders in ``top`` that have the name of a run."""
    with os.scandir(top) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _size_of_run(folder: Path) -> int | None:
    """Return the bytes of the run in ``folder``; None if it must not be removed.

    A folder stays if it is another user's, holds files that are not lagom's or snapshots to go on from, or is no run.

    This is done for all kept runs when a run ends, so each folder is listed once and each file looked at once.
    """
    names, size = set(), 0
    try:
        if folder.lstat().st_uid != os.geteuid():
            return None
        for entry in _entries(folder):
            names_inside = next((inside for name, inside in _INSIDE.items() if name.fullmatch(entry.name)), None)
            if names_inside is not None and entry.is_dir(follow_symlinks=False):
                inside = _size_of_files(_entries(entry), names_inside)
            else:
                inside = _size_of_files([entry], _OURS)
            if inside is None or (entry.name == FOLDER and not os.path.exists(f"{entry.path}/{RESULT}")):
                return None  # not lagom's, or snapshots from which the run can go on
            names.add(entry.name)
            size += inside
    except OSError:  # another process removes it
        return None
    return size if "run.json" in names else None


def _entries(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _size_of_files(entries: list[os.DirEntry[str]], names: re.Pattern[str]) -> int | None:
    """Return the bytes of ``entries``; None when one of them is no plain file with one of these names."""
    if not all(names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries):
        return None
    return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


def _number(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not number >= 0:
        raise ValueError(f'the environment variable {name} is {text!r}; want a number, or "inf" to keep all')
    return number
