"""``TrainingThreads``: refuses threads of the program that train at the same time."""

from __future__ import annotations

import sys
import threading
import weakref

from lagom.errors import DivergenceError

_WAITING = ("threading", "concurrent", "queue", "multiprocessing", "asyncio", "selectors", "socket")
"""Packages of Python with functions in which a thread waits for another thread."""


class TrainingThreads:
    """Refuses backwards in two threads that run at once; threads that wait for each other may take turns.

    Ranks exchange gradients in the order of their backwards, which differs between ranks if threads race.
    """

    def __init__(self) -> None:
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._last = 0

    def check(self) -> None:
        """Record that this thread runs a backward.

        Raises:
            DivergenceError: if another thread that has run a backward is at work now.
        """
        if threading.get_ident() == self._last:
            return
        here = threading.current_thread()
        if isinstance(here, threading._DummyThread):  # a thread of autograd, in which a checkpoint runs a backward
            return
        others = [one for one in self._threads if one is not here and one.is_alive() and not _waits(one)]
        self._threads.add(here)
        self._last = threading.get_ident()
        if others:
            raise DivergenceError(_AT_ONCE.format(one=here.name, other=others[0].name))


def _waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in _WAITING


_AT_ONCE = (
    "two threads of the program train at the same time ({one} and {other}); ranks would exchange their gradients in "
    "another order each. Train one after the other, or run them as trials of a search"
)
