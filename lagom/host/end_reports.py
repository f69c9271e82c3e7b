"""Reports of how ranks end: ``death_report`` and ``stop_report`` stand in for a rank that sends none.

``num_kills`` counts the processes that the system killed as memory ran out; a rank may be one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lagom.wire.framing import MAX_TEXT, shorten
from lagom.wire.messages import RankReport

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
"""Signals that a process brings on itself: a mistake in its code, which it would repeat; others come from outside."""

_TEXTS = ("message", "traceback", "exit")
"""Parts of a report that may be long texts; "exit" may also be a number."""


def death_report(rank: int, status: int, tail: bytes, kills: Mapping[str, int]) -> RankReport:
    """Return the report of a rank that ended without one.

    Args:
        status: of ``os.waitpid``.
        tail: the rank's last output.
        kills: the host's counts of out-of-memory kills before the run.
    """
    lost = os.WIFSIGNALED(status) and os.WTERMSIG(status) not in _FAULTS
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        named = number in set(signal.Signals)  # real-time signals have no names
        how = f"was killed by {signal.Signals(number).name if named else f'signal {number}'}"
        if number == signal.SIGKILL:
            how += oom_kill_text(kills, num_kills())
    else:
        how = f"ended by itself with exit status {os.WEXITSTATUS(status)} before the function returned"
    output = tail.decode(errors="replace")
    return RankReport(
        rank=rank,
        ok=False,
        died=how,
        lost=lost,
        error="RankError",
        message=f"rank {rank} {how}",
        traceback=f"its last output:\n{output}" if output.strip() else "it wrote nothing before",
    )


def stop_report(rank: int) -> RankReport:
    """Return the report of a rank that was stopped before it sent one: another rank failed, or the driver said stop."""
    return RankReport(rank=rank, ok=False, stopped=True, consequence=True)


def first_failure(reports: Sequence[RankReport]) -> RankReport | None:
    """Return the report of a rank that failed by itself; without one, of a rank that failed because another one did.

    Return None if no rank has failed.
    """
    failed = [report for report in reports if report.has_failed]
    return min(failed, key=lambda report: report.consequence, default=None)


def fit_reports(reports: Sequence[RankReport]) -> list[RankReport]:
    """Return ``reports`` for the driver, with texts so short that one frame holds all reports."""
    share = MAX_TEXT // max(1, sum(bool(report.traceback) for report in reports))
    reports_that_fit = []
    for report in reports:
        texts = {name: text for name in _TEXTS if isinstance(text := getattr(report, name), str)}
        short: dict[str, Any] = {
            name: shorten(text, share, keep_end=name == "traceback") for name, text in texts.items()
        }
        # Output is in a report only if the connection to the driver was lost.
        reports_that_fit.append(dataclasses.replace(report, output=[], **short))
    return reports_that_fit


def called_exit(report: RankReport | None) -> bool:
    """Return whether the rank called ``sys.exit``."""
    return report is not None and report.exited


def num_kills(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the kills in this process's control group, which has a container's limit, and on the whole machine.

    A count that cannot be read is missing.
    """
    kills: dict[str, int] = {}
    with contextlib.suppress(OSError):
        if counts := _of_groups(root, proc):
            kills["container"] = counts[0]
    with contextlib.suppress(OSError):
        if counted := re.search(r"^oom_kill (\d+)$", (proc / "vmstat").read_text(), flags=re.MULTILINE):
            kills["machine"] = int(counted[1])
    return kills


def _of_groups(root: Path, proc: Path) -> list[int]:
    """Return the count of the innermost control group (version 1 or 2) that has one, in a list; [] if none has one."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.oom_control") if controllers else (root, "memory.events")
        # In a container the path may be the host's and not exist here: then the root is the container's own group.
        for folder in (base / path.lstrip("/"), base):
            with contextlib.suppress(OSError):
                counted = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), flags=re.MULTILINE)
                if counted:
                    return [int(counted[1])]
    return []


def oom_kill_text(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Explain a SIGKILL that lagom did not send, as the end of a sentence."""
    more = {where for where in before if after.get(where, 0) > before[where]}
    if "container" in more:
        return ", by the system, as memory ran out within the limit of this container"
    if "machine" in more:
        return ", by the system, as this machine's memory ran out"
    if "machine" in before:
        return ", which a person or a cluster manager has sent: this machine did not run out of memory"
    return ", as the system does when memory runs out"
