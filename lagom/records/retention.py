"""``Retention``: how many runs the default folder keeps; what is older is removed, but for what is not lagom's."""

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

ALIVE = ".alive"
"""A file in a run's folder that is locked while the run is under way."""
_NAME = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}")
_OURS = re.compile(
    r"(run|result|timeline|timeline-summary)\.json|progress\.jsonl|rank-\d+\.(log|jsonl)|lagom\.log|picture-\d+\.png|report\.html|timelines|\..*"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Limits, of which the first that is reached counts."""

    num_runs: float = 200
    num_mb: float = 500

    @classmethod
    def from_environment(cls) -> Retention:
        """What ``LAGOM_KEEP_RUNS`` and ``LAGOM_KEEP_MB`` say; "inf" keeps all.

        Raises:
            ValueError: when one of them is no number.
        """
        return cls(num_runs=_number("LAGOM_KEEP_RUNS", 200), num_mb=_number("LAGOM_KEEP_MB", 500))

    def remove_older(self, top: Path) -> None:
        """Remove runs from ``top`` until the limits hold. The newest stays, and so do runs that are under way."""
        num_bytes = 0
        for number, folder in enumerate(sorted(_runs(top), reverse=True), 1):
            num_bytes += sum(path.lstat().st_size for path in folder.rglob("*"))
            if number > 1 and (number > self.num_runs or num_bytes > self.num_mb * 1e6):
                with contextlib.suppress(OSError), alone(folder):
                    shutil.rmtree(folder)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder of a run as its only process.

    Raises:
        OSError: when another process holds it.
    """
    lock = os.open(folder / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _runs(top: Path) -> Iterator[Path]:
    """Folders of runs in ``top`` that hold nothing but what lagom writes."""
    for folder in top.iterdir():
        if _NAME.fullmatch(folder.name) and not folder.is_symlink() and (folder / "run.json").is_file():
            inside = [path for path in folder.rglob("*") if not _OURS.fullmatch(path.name)]
            if not inside and folder.stat().st_uid == os.geteuid():
                yield folder


def _number(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not number >= 0:
        raise ValueError(f'the environment variable {name} is {text!r}; want a number, or "inf" to keep all')
    return number
