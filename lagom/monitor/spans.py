"""``Spans``: what a rank does, and from when to when: noted in memory as it runs, and given away in blocks."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

DATA, COPY, FORWARD, BACKWARD, OPTIMIZER = "data", "copy", "forward", "backward", "optimizer"
COLLECTIVE = "collective"
FETCH, STEP, ACTIVITY = "fetch", "step", "activity"
PHASES = DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE
"""What the time of a program is divided into; the others are rows of their own."""

FIRST, LATER = 100, 20
"""Steps that are kept: so many from the first on, and so many from the 200th, the 400th, the 800th ... on."""
_FIRST_SPANS, _LATER_SPANS, _ALL_SPANS = 10_000, 2_000, 30_000
"""Spans of these that are kept at most. One takes about 150 bytes in the trace."""
_BLOCK = 4000
_PAUSE = 1.1
"""Where nothing is noted, blocks with totals come when the time that has passed is so many times that of the last."""
_LOOPS = 8
"""Backwards without a batch from a loader, after which each of them counts as a step."""


class Span(NamedTuple):
    """Nanoseconds are those of the host's monotonic clock."""

    kind: str
    name: str
    start: int
    end: int
    thread: int
    """As ``threading.get_ident`` has it."""
    size: int = 0
    """Bytes."""
    stream: str = ""
    """Exchanges of one stream come in the same order on all ranks that have it."""
    number: int = -1
    """In its stream; of a step, which one."""


class Spans:
    """Belongs to the thread that makes it, whose time it divides into phases. See Note [What is kept].

    Args:
        clock: nanoseconds, for tests.
    """

    def __init__(self, rank: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.rank = rank
        self.clock = clock
        self.thread = get_ident()
        self.inner = 0
        """Nanoseconds of spans that have ended inside the one that is open."""
        self.totals = dict.fromkeys(PHASES, 0)
        """Nanoseconds of each phase without what is inside of it; of all steps, kept or not."""
        self.num_steps = 0
        self.keeps = True
        self._begun = clock()
        self._spans: list[Span] = []
        self._room = _FIRST_SPANS
        self._left = _ALL_SPANS
        self._closes_at, self._opens_at = FIRST + 1, 2 * FIRST
        self._step_at = 0
        self._loops, self._patience = 0, 0
        self._counts: dict[str, int] = {}
        self._told = 0
        self._header = {"rank": rank, "host": socket.gethostname(), "clock": clock_id(), "pid": os.getpid()}
        self._header |= {"thread": self.thread, "wall_ns": time.time_ns(), "clock_ns": clock()}
        _alive.add(self)

    def end(
        self, kind: str, name: str, start: int, before: int, size: int = 0, stream: str = "", number: int = -1
    ) -> None:
        """What began at ``start`` in the program's own thread, when ``inner`` was ``before``, is over."""
        now = self.clock()
        self.totals[kind] += now - start - self.inner
        self.inner = before + now - start
        if self.keeps:
            self._keep(Span(kind, name, start, now, self.thread, size, stream, number))

    def spend(self, kind: str, start: int, before: int) -> None:
        """As ``end``, of time that is a part of a longer span."""
        length = self.clock() - start
        self.totals[kind] += length - self.inner
        self.inner = before + length

    def add(self, kind: str, name: str, start: int, size: int = 0, stream: str = "", number: int = -1) -> None:
        """Note what began at ``start`` and is over, beside what the program's own thread does."""
        if self.keeps:
            self._keep(Span(kind, name, start, self.clock(), get_ident(), size, stream, number))

    def timed(self, kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its calls noted."""

        def call(*args: Any, **options: Any) -> Any:
            start = self.clock()
            if get_ident() != self.thread:
                try:
                    return function(*args, **options)
                finally:
                    self.add(kind, name, start)
            before, self.inner = self.inner, 0
            try:
                return function(*args, **options)
            finally:
                self.end(kind, name, start, before)

        return call

    def next_number(self, stream: str) -> int:
        """Of an exchange that begins; to be asked for whether spans are kept or not."""
        number = self._counts.get(stream, 0)
        self._counts[stream] = number + 1
        return number

    def batch(self, start: int) -> None:
        """A loader gave a batch that was asked for at ``start``."""
        self._loops, self._patience = 0, _LOOPS
        self._step(start)

    def backward(self, start: int) -> None:
        """A backward begins; a step does where no loader gives batches."""
        self._loops += 1
        if self._loops > self._patience:
            self._step(start)

    def _step(self, start: int) -> None:
        if self._step_at and self.keeps:
            self._keep(Span(STEP, f"step {self.num_steps}", self._step_at, start, self.thread, number=self.num_steps))
        self.num_steps += 1
        self._step_at = start
        if self.num_steps == self._closes_at:
            self.keeps = False
        elif self.num_steps == self._opens_at:
            self.keeps, self._room = self._left > 0, min(_LATER_SPANS, self._left)
            self._closes_at, self._opens_at = self._opens_at + LATER, 2 * self._opens_at

    def _keep(self, span: Span) -> None:
        self._spans.append(span)
        self._room -= 1
        self._left -= 1
        if self._room <= 0:
            self.keeps = False

    def blocks(self, *, last: bool = False) -> Iterator[dict[str, Any]]:
        """What has been noted since the last time, as messages; from any one thread at a time.

        Args:
            last: there will be no more, so that totals are wanted also where nothing has been noted.
        """
        elapsed = self.clock() - self._begun
        if not (self._spans or last or elapsed > _PAUSE * self._told):
            return
        self._told = elapsed
        while True:
            # Two steps, each of which Python does at once: what is noted meanwhile comes behind.
            spans = self._spans[:_BLOCK]
            del self._spans[: len(spans)]
            yield {"type": "timeline", "data": self._packed(spans)}
            if len(spans) < _BLOCK:
                return

    def _packed(self, spans: list[Span]) -> str:
        now = {"totals": dict(self.totals), "steps": self.num_steps, "elapsed": self.clock() - self._begun}
        text = json.dumps(self._header | now | {"spans": spans}, separators=(",", ":"))
        return base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def unpacked(data: str, most: int = 16 << 20) -> str:
    """The text of a block, of ``most`` bytes.

    Raises:
        ValueError: when that is not what it is.
    """
    try:
        found = zlib.decompressobj()
        text = found.decompress(base64.b64decode(data, validate=True), most)
        if not found.eof:
            raise ValueError("a block of a timeline is too long, or cut off")
        return text.decode()
    except zlib.error as error:
        raise ValueError(f"a block of a timeline is damaged: {error}") from error


def clock_id() -> str:
    """Equal for processes whose monotonic clocks show the same."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    return f"{socket.gethostname()} {os.getpid()}"


_current: Spans | None = None


@contextmanager
def current(spans: Spans) -> Iterator[None]:
    """Have ``activity`` note into ``spans``."""
    global _current  # of the run that this process is a rank of
    before, _current = _current, spans
    try:
        yield
    finally:
        _current = before


@contextmanager
def activity(row: str, name: str, size: int = 0) -> Iterator[None]:
    """Note what is done in here as ``name`` on a row of its own, such as that of a tensor; without a timeline, nothing.

    May be called in any thread, and left in another one than it was entered in.
    """
    spans = _current
    if spans is None or not spans.keeps:
        yield
        return
    start = spans.clock()
    try:
        yield
    finally:
        spans.add(ACTIVITY, name, start, size, row)


_alive: weakref.WeakSet[Spans] = weakref.WeakSet()


def _forget() -> None:
    for spans in list(_alive):
        spans.keeps, spans._left = False, 0


# A loader worker is no rank.
os.register_at_fork(after_in_child=_forget)

# Note [What is kept]
#
# A run may take days, and a trace of more than some tens of MB is of no use. So the first 100 steps are kept, and then
# 20 steps each from the 200th, the 400th, the 800th ... on: all ranks keep the same ones, since they take the same
# steps, so that exchanges can be compared. What is divided into phases is the time of all steps.
