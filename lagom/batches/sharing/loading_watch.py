"""``watched_loading``: notice what the loading of samples writes, prints or starts, or keep it from doing so."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from lagom.batches.sharing.worker_watch import FILE_CHANGES, LOADER, PROGRAMS, is_local, writes_file
from lagom.exchange.background import EXCHANGE_EVENT
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_PROCESS = {"os.chdir", "os.putenv", "os.unsetenv", "sqlite3.connect", "mmap.__new__"}
_CHANGES = FILE_CHANGES | _OF_PROCESS | {EXCHANGE_EVENT, LOADER}
"""Audit events of changes that loading may make outside of the process, besides opened files and started programs."""


class StoppedError(Exception):
    """Samples that are loaded for all ranks were about to leave a trace, which they must not."""


class LoadingWatch:
    """Record of what one loading of samples did besides making them.

    Args:
        stops: whether it is kept from doing so: a print writes nothing, and what would change a file is an error.
        only_exchanges: whether only exchanges with other ranks count.
    """

    def __init__(self, stops: bool, *, only_exchanges: bool = False) -> None:
        self.stops, self._only_exchanges = stops, only_exchanges
        self.seen: list[str] = []
        """What it did, in words, each with its verb."""
        self._warnings: list[Any] = []

    def note(self, what: str) -> bool:
        """Note that loading does ``what``; return whether it may."""
        self.seen.append(what)
        return not self.stops

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Note an audit event of this thread.

        Raises:
            StoppedError: before the change, if this watch stops it.
        """
        if self._only_exchanges and event not in (EXCHANGE_EVENT, LOADER):
            return
        if event == "open":
            if not writes_file(*args):
                return
            what = f"writes {args[0]}"
        elif event == "mmap.__new__" and (args[0] == -1 or args[2] != _SHARED):
            return
        elif event in _CHANGES or event in PROGRAMS or (event == "socket.connect" and is_local(args[1])):
            what = _WORDS.get(event, f"calls {event}")
        else:
            return
        if not self.note(what):
            raise StoppedError(what)

    def warn(self, message: Any) -> bool:
        """Note a warning; return whether it may be shown."""
        self._warnings.append(message)
        return self.note(f"warns: {message.message}")

    def forget_warnings(self) -> None:
        """Let the warnings that were not shown be shown when they are raised again."""
        seen = [(str(one.message), one.category, one.lineno) for one in self._warnings]
        # The keys of the filters "default", "once" and "module".
        keys = {key for text, kind, line in seen for key in ((text, kind, line), (text, kind), (text, kind, 0))}
        for key in keys:
            warnings.onceregistry.pop(key, None)  # type: ignore[attr-defined]
        for module in list(sys.modules.values()) if keys else ():
            known = getattr(module, "__dict__", {}).get("__warningregistry__")
            if isinstance(known, dict):
                for key in keys.intersection(known):
                    del known[key]

    def show_rest(self, again: LoadingWatch) -> None:
        """Show the warnings that were held back and that ``again`` has not seen: C code gives some only once."""
        seen = {(str(one.message), one.category) for one in again._warnings}
        for one in self._warnings:
            if (str(one.message), one.category) not in seen:
                warnings._showwarnmsg(one)  # type: ignore[attr-defined]


_WORDS = {LOADER: "reads another data loader", EXCHANGE_EVENT: "has ranks exchange data"}
_SHARED = 2
"""``mmap.ACCESS_WRITE``."""
_watched = threading.local()


def can_watch() -> bool:
    """Return whether prints can be noticed."""
    return all(hasattr(stream, "__dict__") for stream in (sys.stdout, sys.stderr))


@contextmanager
def watched_loading(*, stops: bool) -> Iterator[LoadingWatch]:
    """Yield a ``LoadingWatch`` of what this thread does in the context."""
    _add_hook()
    watch = LoadingWatch(stops)
    handle, show = logging.Logger.handle, warnings._showwarnmsg  # type: ignore[attr-defined]
    start = threading.Thread.start

    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not _is_mine(watch) or watch.note(f"logs to {logger.name}"):
            handle(logger, record)

    def shown(message: Any) -> None:
        if not _is_mine(watch) or watch.warn(message):
            show(message)

    def started(thread: threading.Thread) -> None:
        if _is_mine(watch) and not watch.note("starts a thread"):
            raise StoppedError("starts a thread")
        start(thread)

    with ExitStack() as stack:
        stack.enter_context(replaced(threading.Thread, "start", started))
        stack.enter_context(replaced(logging.Logger, "handle", handled))
        stack.enter_context(replaced(warnings, "_showwarnmsg", shown))
        streams = sys.stdout, sys.stderr, *(one for one in (sys.__stdout__, sys.__stderr__) if hasattr(one, "__dict__"))
        for stream in {id(one): one for one in streams}.values():
            stack.enter_context(_noted_prints(stream, watch))
        _watched.by = watch
        try:
            yield watch
        finally:
            _watched.by = None


@contextmanager
def watched_exchanges(*, stops: bool) -> Iterator[LoadingWatch]:
    """Yield a ``LoadingWatch`` of exchanges with other ranks alone, which would meet others of theirs."""
    _add_hook()
    _watched.by = watch = LoadingWatch(stops, only_exchanges=True)
    try:
        yield watch
    finally:
        _watched.by = None


@contextmanager
def _noted_prints(stream: Any, watch: LoadingWatch) -> Iterator[None]:
    write = stream.write

    def written(text: str) -> int:
        if not _is_mine(watch) or watch.note("prints"):
            return int(write(text) or 0)
        return len(text)

    with replaced(stream, "write", written):
        yield


def _is_mine(watch: LoadingWatch) -> bool:
    return getattr(_watched, "by", None) is watch


@cache
def _add_hook() -> None:
    """Add an audit hook, which Python cannot remove again."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        watch = getattr(_watched, "by", None)
        if watch is not None:
            watch.audit(event, args)

    sys.addaudithook(hook)
