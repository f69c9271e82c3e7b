"""Reports of how ranks end: ``death_report`` and ``stop_report`` stand in for a rank that sends none."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.host import oom_kills
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
            how += oom_kills.oom_kill_text(kills, oom_kills.num_kills())
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
    found = []
    for report in reports:
        texts = {name: text for name in _TEXTS if isinstance(text := getattr(report, name), str)}
        short: dict[str, Any] = {
            name: shorten(text, share, keep_end=name == "traceback") for name, text in texts.items()
        }
        # Output is in a report only if the connection to the driver was lost.
        found.append(dataclasses.replace(report, output=[], **short))
    return found


def called_exit(report: RankReport | None) -> bool:
    """Return whether the rank called ``sys.exit``."""
    return report is not None and report.exited
