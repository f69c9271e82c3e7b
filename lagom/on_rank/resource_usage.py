"""``ResourceUsage``: measures how much CPU, memory and accelerator a rank and its child processes use."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

_MAX_CHILDREN = 64
_TICKS_S = os.sysconf("SC_CLK_TCK")


class ResourceUsage:
    """Measures the use of resources between calls of ``now``.

    Args:
        device: name of the device on which the rank trains, such as "cpu", with its number if it is an accelerator.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = time.monotonic(), _processor_s()
        self._tells = device != "cpu"

    def now(self) -> dict[str, Any]:
        """Return the use of resources since the last call.

        ``cpu`` is the average number of busy CPUs, with those of child processes such as loader workers; ``rss`` the
        resident memory of this process in bytes. ``memory`` is the bytes that torch has allocated on the
        accelerator if the rank trains there, else ``rss``. ``gpu`` is the share of the time in which the accelerator
        was busy; None on the CPU, or if it does not tell (NVIDIA's does by its library, nvidia-ml-py).
        """
        at, used_s = time.monotonic(), _processor_s()
        before, used_before = self._before
        self._before = at, used_s
        # The difference may be negative: the time of workers that have ended since the last call is missing.
        cpu = max(0.0, used_s - used_before) / max(at - before, 1e-3)
        usage = {"cpu": round(cpu, 2), "rss": _resident(), "gpu": self._busy()}
        return usage | {"memory": usage["rss"] if self._device == "cpu" else self._allocated()}

    def _busy(self) -> float | None:
        if self._tells:
            import torch

            from lagom.accelerators import utilization

            try:
                return utilization(torch.device(self._device))
            except Exception:  # the maker's library is missing, or does not know this device
                self._tells = False
        return None

    def _allocated(self) -> int | None:
        import torch

        from lagom.accelerators import allocated_bytes

        return allocated_bytes(torch.device(self._device))


def _resident() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def processor_s_below(pid: int) -> float:
    """Return the CPU time in seconds of all descendants of ``pid``, including those that have ended."""
    times = _times(pid)
    return times[2] + times[3] + sum(_with_below(child) for child in children(pid))


def _with_below(pid: int) -> float:
    return sum(_times(pid)) + sum(_with_below(child) for child in children(pid))


def _times(pid: int) -> tuple[float, float, float, float]:
    """Return user and system seconds of the process, then of its reaped children; zeros if the process has ended."""
    try:
        # The process name may contain anything, so read the fields after it: 14 to 17 of the line.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user, kernel, childrens_user, childrens_kernel = (int(field) / _TICKS_S for field in fields[11:15])
    except (OSError, ValueError):
        return 0.0, 0.0, 0.0, 0.0
    return user, kernel, childrens_user, childrens_kernel


def _processor_s() -> float:
    """Return the CPU time of this process with all its threads, and of its living children."""
    total = time.process_time()
    return total + sum(sum(_times(child)[:2]) for child in children(os.getpid())[:_MAX_CHILDREN])


def children(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started or adopted, and not yet reaped; empty if ``pid`` has ended."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found
