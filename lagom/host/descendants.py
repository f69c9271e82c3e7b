"""Processes below a host process, however they were started: none of them outlives it. See Note [Descendants]."""

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

from lagom.worker.process_tree import children

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLEANER = re.compile(rb"(.*/)?torch_shm_manager\0|.*\0from [\w.]+\.resource_tracker import main;", re.DOTALL)
"""The command line of a process that removes shared memory when its users have ended, and then ends: torch's, Python's,
joblib's. None of them is ever killed."""
_END_S = 5.0  # after which a process is left behind that waits for a disk, which SIGKILL does not end, or still removes
_TURN_S = 0.01


class Orphaned(BaseException):
    """The process above this one has ended."""


def fork_host(function: Callable[[], None]) -> int:
    """Run ``function`` in a child that holds processes of its own: they end with it, and it ends with this process.

    Returns:
        Its process id. Its exit status is 0 when ``function`` returned.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads that the child will not have; it uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        try:
            for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)  # what ends the group of the process above comes by that one's end
            adopt_orphans(True)
            _raise_at_end_of(parent)
            function()
            code = 0
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Orphaned is raised until here; what follows is done whole
    except Orphaned:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _raise_at_end_of(parent: int) -> None:
    """Raise ``Orphaned`` here, once, when ``parent`` ends."""

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Orphaned

    signal.signal(signal.SIGTERM, end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end()


def _leave(code: int) -> NoReturn:
    try:
        end_descendants()
    finally:
        os._exit(code)


_adopts = False


def adopt_orphans(whether: bool) -> None:
    """Have what is orphaned below this process become a child of it, rather than of the system's first process."""
    global _adopts  # of this process
    if sys.platform == "linux":
        _adopts = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) == 0 and whether


def end_rank(pid: int, others: Collection[int]) -> None:
    """Kill the rank ``pid`` and what it has started, but none of the ``others``, which are alive, nor what is theirs.

    While there are others, an orphan in a session or group of its own may be theirs; it goes with the last rank.
    """
    if _adopts:
        mine = [child for child in children(os.getpid()) if child not in others]
        if others:
            mine = [child for child in mine if child == pid or _group(child) == pid]
        for child in _kill([one for top in mine for one in (top, *_below(top, ()))]):
            if child != pid:  # whose exit status is wanted
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reap_adopted(ranks: Collection[int]) -> None:
    """Let those go that were orphaned and have ended; ``ranks`` are the children that are this process's own."""
    for child in set(children(os.getpid())) - set(ranks) if _adopts else ():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def end_descendants(kept: Collection[int] = ()) -> None:
    """End all below this process, but for the children in ``kept`` and what is below them; waits for their ends."""
    start = time.monotonic()
    while (left := _kill(list(_below(os.getpid(), kept)))) and time.monotonic() - start < _END_S:
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_TURN_S)


def _kill(found: list[int]) -> list[int]:
    """Kill all of them but those that clean; returns all, ended ones among them."""
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
# A program's pools, data loader workers and subprocesses go on when the rank that started them is killed, with all
# that they have of its memory. Process groups do not hold them: a subprocess may have a session of its own. So a host
# process adopts what is orphaned below it (Linux's child subreaper), and ends all below it before it ends. The
# process above it, Spark's Python worker or the local fork server, does so too as long as it has host processes: one
# that is killed itself leaves what was below it to that. When the process above ends first, the kernel tells the host
# process. Only where both are killed in the same moment is anything left.
#
# Processes that remove shared memory are never killed: Python's and joblib's resource trackers, torch's manager. They
# remove what has a name when all who used it have ended, and end then, however long a busy machine keeps them waiting.
# Where somebody else kills one of them, the memory stays, as it does in a plain run.
#
# What is orphaned says no more which rank it comes from, unless it is still in the rank's process group. So the end of
# one rank takes only those of its group along: a server that another rank has put into the background goes on.
