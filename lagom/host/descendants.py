"""Processes below a host process, however they were started: all end before it does. See Note [Descendants]."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

from lagom.on_rank.resource_usage import children
from lagom.wire.rendezvous import REPEATED_S

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLEANER = re.compile(rb"(.*/)?torch_shm_manager\0|.*\0from [\w.]+\.resource_tracker import main;", re.DOTALL)
"""Command lines of processes that remove shared memory after its users have ended: torch's, Python's and joblib's. They
end by themselves and are never killed."""
END = signal.SIGHUP
"""Signal by which a fork server ends its host processes; SIGTERM may come from anybody, as a notice."""
_ENDS = (END, signal.SIGTERM)
_END_S = 5.0  # then leave processes that wait for a disk, which SIGKILL does not end, or still remove shared memory
_TURN_S = 0.01


class Orphaned(BaseException):
    """Raised when this process's parent has ended or has told this process to end (SIGHUP), and at SIGTERM."""


def fork_host(function: Callable[[], None]) -> int:
    """Run ``function`` in a child process, which ends with this one; processes started by the child end with the child.

    Returns:
        The child's process id. The exit status is 0 when ``function`` returned.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns that the child lacks the parent's threads; the child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        try:
            for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)  # a signal to the parent's group must not reach the child; the parent's end does
            adopt_orphans(True)
            _raise_at_end_of(parent)
            function()
            code = 0
        finally:
            _ignore_ends()  # no Orphaned from here on: the clean-up must complete
    except Orphaned:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        _exit_host(code)


def _raise_at_end_of(parent: int) -> None:
    """Raise ``Orphaned`` in this process, once, when ``parent`` ends or sends SIGHUP, or at SIGTERM from anybody."""

    def end(*_: Any) -> None:
        _ignore_ends()
        raise Orphaned

    for number in _ENDS:
        signal.signal(number, end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, END)
    if os.getppid() != parent:
        end()


def _ignore_ends() -> None:
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def heard_sigterm() -> Iterator[int]:
    """Context manager of a host process that does not end at its first SIGTERM, but reads it from the yielded pipe.

    A second SIGTERM ends the process as before, unless it follows within ``REPEATED_S``.
    """
    reader, writer = os.pipe()
    before = signal.getsignal(signal.SIGTERM)

    heard_at: float | None = None

    def hear(*_: Any) -> None:
        nonlocal heard_at
        now = time.monotonic()
        if heard_at is None:
            heard_at = now
            os.write(writer, b"T")
        elif now - heard_at > REPEATED_S:
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, hear)
    try:
        yield reader
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
        os.close(writer)


def _exit_host(code: int) -> NoReturn:
    try:
        end_descendants()
    finally:
        os._exit(code)


adopts_orphans = False
"""Whether this process becomes the parent of orphans below it."""


def adopt_orphans(whether: bool) -> None:
    """Make this process, instead of the system's first, the parent of processes orphaned below it, or stop that."""
    global adopts_orphans  # state of this process
    if sys.platform == "linux":
        adopts_orphans = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) == 0 and whether


def end_rank(pid: int, others: Collection[int], kept: Collection[int] = ()) -> None:
    """Kill the rank ``pid`` and the processes that it started, but not the living ``others`` nor their processes.

    While there are others, an orphan in a session or group of its own may be theirs; it is killed with the last rank.
    The processes in ``kept`` live too, and have started none. A process that adopts no orphans only kills the rank's
    process group.
    """
    if adopts_orphans:
        mine = [child for child in children(os.getpid()) if child not in others and child not in kept]
        if others:
            mine = [child for child in mine if child == pid or _group(child) == pid]
        for child in _kill([one for top in mine for one in (top, *_below(top, ()))]):
            if child != pid:  # the caller reads the rank's own exit status
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reap_adopted(ranks: Collection[int]) -> None:
    """Reap adopted orphans that have ended, but no process in ``ranks``, whose exit status the caller reads itself."""
    for child in set(children(os.getpid())) - set(ranks) if adopts_orphans else ():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def end_descendants(kept: Collection[int] = ()) -> None:
    """End all processes below this one except the children in ``kept`` and their descendants; wait up to ``_END_S``."""
    start = time.monotonic()
    while (left := _kill(list(_below(os.getpid(), kept)))) and time.monotonic() - start < _END_S:
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_TURN_S)


def _kill(found: list[int]) -> list[int]:
    """Kill the processes ``found`` except those that remove shared memory; return all of ``found``."""
    for pid in found:
        if not _cleans(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return found


def _below(pid: int, kept: Collection[int]) -> Iterator[int]:
    for child in children(pid):
        if child not in kept:
            yield child
            yield from _below(child, ())


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _cleans(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _CLEANER.match(Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    return False


# Note [Descendants]
#
# A program's pools, data loader workers and subprocesses go on when the rank that started them is killed, and keep
# their memory. A process group does not contain them all: a subprocess may have a session of its own. So a host process
# adopts the orphans below it (Linux's child subreaper), and ends all processes below it before it ends. Its parent, a
# fork server, does the same: it ends the processes that a killed host process leaves. When the parent ends first, the
# kernel signals the host process. Processes are left only if both are killed at the same moment.
#
# Processes that remove shared memory are never killed: Python's and joblib's resource trackers, torch's manager. They
# remove named memory after all its users have ended, and then end, however long that takes on a busy machine. If
# somebody else kills one of them, the memory stays, as it does in a plain run.
#
# An orphan no longer shows which rank started it, unless it is still in the rank's process group. So the end of one
# rank ends only the orphans of its group: a server that another rank has put into the background goes on.
