"""``available_cores``: cores that this process may use; ``control_groups`` finds the limits of its container."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores(root: Path = ROOT, own: Path = OWN) -> int:
    """Return the number of cores on which this process may run, or fewer if its container has less processor time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([cores, *_quotas(root, own)])))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the cores' worth of time that this process's control groups and their parents allow."""
    for folder, is_unified in control_groups("cpu", root, own):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            if is_unified:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # -1 is no limit
                yield quota / period


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups and of their parents, the innermost first.

    Args:
        controller: "memory" or "cpu".
        root: where the system shows control groups.
        own: the file in which the system names this process's groups.

    Returns:
        Folders, each with whether it belongs to version 2, in which all controllers have one folder.
    """
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        inner = base / path.lstrip("/")
        # In a container the path may be the host's and not exist here; then the root holds the container's own limit.
        for folder in (inner, *inner.parents):
            yield folder, not controllers
            if folder == base:
                break
