"""``sigterm_heard``: SIGTERM to a rank is a notice that its host process reads. See Note [SIGTERM to a rank]."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lagom.patching.replace import replaced

_hears = False
"""Whether this process writes to its host process at SIGTERM, unless the program has set another handler since."""


@contextmanager
def sigterm_heard(pipe: int) -> Iterator[None]:
    """Context manager of a rank that writes to ``pipe`` at SIGTERM, and goes on.

    Its forks, and the rank if it sends SIGTERM to itself, end as without lagom.
    """
    global _hears  # state of this process
    hear = functools.partial(faulthandler.register, signal.SIGTERM, file=pipe, all_threads=False)
    hear()
    _hears = True
    os.register_at_fork(after_in_child=stop_hearing)
    own = {0, os.getpid(), -os.getpid()}
    with (
        replaced(os, "kill", _ending(os.kill, own)),
        replaced(os, "killpg", _ending(os.killpg, own)),
        replaced(signal, "raise_signal", _ending_itself(signal.raise_signal)),
        replaced(signal, "signal", _hearing_again(signal.signal, hear)),
    ):
        yield


def stop_hearing() -> None:
    """Let SIGTERM end this process again, unless the program has set another handler."""
    global _hears  # state of this process
    if _hears and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        faulthandler.unregister(signal.SIGTERM)
    _hears = False


def _ending(send: Callable[[int, int], None], own: set[int]) -> Callable[[int, int], None]:
    """Return ``os.kill`` or ``os.killpg``, by which this process, one of ``own``, ends itself at once."""

    @functools.wraps(send)
    def kill(pid: int, number: int, /) -> None:
        if number == signal.SIGTERM and pid in own:
            stop_hearing()
        send(pid, number)

    return kill


def _ending_itself(send: Callable[[int], None]) -> Callable[..., Any]:
    @functools.wraps(send)
    def raise_signal(signalnum: int) -> None:
        if signalnum == signal.SIGTERM:
            stop_hearing()
        send(signalnum)

    return raise_signal


def _hearing_again(set_handler: Callable[..., Any], hear: Callable[[], None]) -> Callable[..., Any]:
    """Return ``signal.signal``, which calls ``hear`` when the program restores the default of SIGTERM."""

    @functools.wraps(set_handler)
    def set_and_hear(signalnum: int, handler: Any) -> Any:
        before = set_handler(signalnum, handler)
        if _hears and signalnum == signal.SIGTERM and handler == signal.SIG_DFL:
            faulthandler.unregister(signal.SIGTERM)
            hear()
        return before

    return set_and_hear


# Note [SIGTERM to a rank]
#
# A batch system that ends a job sends SIGTERM to all of its processes at once, so also to ranks, and kills them some
# seconds later. A rank that ended at SIGTERM would leave the driver no time for a last snapshot. A handler of Python's
# would be seen by the program: ``signal.getsignal`` would not return SIG_DFL, so that some libraries would set no
# handler of their own; forks would inherit it; and it would run only between two instructions of Python. Standard
# Python has one handler in C that writes to a file: faulthandler's. It writes a traceback, which the host process reads
# as a notice and throws away. Python's own table of handlers does not show it, and a handler that the program sets
# takes its place: then nothing of this happens, until the program restores the default.
