"""``Spans``: records a rank's activities with start and end, in memory, and returns them in blocks."""

from __future__ import annotations

import base64
import itertools
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

from lagom.watch.messages import Timeline

DATA, COPY, FORWARD, BACKWARD, OPTIMIZER = "data", "copy", "forward", "backward", "optimizer"
COLLECTIVE, ASYNCHRONOUS = "collective", "asynchronous"
"""Exchanges that occupy the program's thread, and exchanges that go on while the thread does something else."""
STEP, ACTIVITY = "step", "activity"
PHASES = DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE
"""Phases that a program's time is divided into; other kinds of spans are shown in rows of their own."""

TIMELINES = "timelines"
"""Folder of the ranks' spans, in a run's folder."""
FIRST, LATER = 100, 20
"""Numbers of steps that are kept: from the first on, and from the 200th, the 400th, the 800th ... on."""
_FIRST_SPANS, _LATER_SPANS, _ALL_SPANS = 10_000, 2_000, 30_000
"""Largest numbers of spans that are kept: of the first steps, of each later group of steps, and in all. Checked between
steps and at each heartbeat. A span takes about 150 bytes in the trace."""
_BLOCK = 4000
_LOOPS = 8
"""Number of backwards after a batch from a loader, after which each further backward counts as a step.

Before the first batch, each backward counts.
"""


class Span(NamedTuple):
    """An activity; nanoseconds are those of the host's monotonic clock."""

    kind: str
    name: str
    start: int
    end: int
    thread: int
    """The result of ``threading.get_ident``."""
    size: int = 0
    """Bytes."""
    stream: str = ""
    """Sequence of exchanges, in the same order on all ranks that have it; of an activity, the name of its row."""
    number: int = -1
    """Number in the stream, or of the step; -1 for none."""


class Spans:
    """Records the activities of one rank. See Note [What is kept].

    Args:
        clock: returns nanoseconds, for tests.
        clock_of: names the clock, for tests; None: the clock of this host.
    """

    def __init__(self, rank: int, clock: Callable[[], int] = time.monotonic_ns, clock_of: str | None = None) -> None:
        self.rank = rank
        self.clock = clock
        self.thread = get_ident()
        """The program's thread."""
        self.num_steps = 0
        self.keeps = True
        """Whether spans are recorded at the moment."""
        self._spans: list[tuple[Any, ...]] = []
        self.append = self._spans.append
        """Takes the fields of a ``Span`` as a tuple: to make a ``Span`` takes longer than all the rest of recording."""
        self._given = 0
        self._ends_at = _FIRST_SPANS
        self._closes_at, self._opens_at = FIRST + 1, 2 * FIRST
        self._step_at = 0
        self._loops, self._patience = 0, 0
        self._counts: dict[str, Callable[[], int]] = {"": itertools.repeat(-1).__next__}
        self._header = {"rank": rank, "host": socket.gethostname(), "clock": clock_of or clock_id(), "pid": os.getpid()}
        self._header |= {"thread": self.thread, "wall_ns": time.time_ns(), "clock_ns": clock()}
        _alive.add(self)

    def add(self, kind: str, name: str, start: int, size: int = 0, stream: str = "", number: int = -1) -> None:
        """Record an activity that began at ``start`` and ends now."""
        if self.keeps:
            self.append((kind, name, start, self.clock(), get_ident(), size, stream, number))

    def timed(
        self, kind: str, name: str, function: Callable[..., Any], size: int = 0, stream: str = ""
    ) -> Callable[..., Any]:
        """Return ``function`` with its calls recorded."""
        clock, append, number = self.clock, self.append, self.numbers(stream)

        def call(*args: Any, **options: Any) -> Any:
            place = number()
            if not self.keeps:
                return function(*args, **options)
            start = clock()
            try:
                return function(*args, **options)
            finally:
                append((kind, name, start, clock(), get_ident(), size, stream, place))

        return call

    def numbers(self, stream: str) -> Callable[[], int]:
        """Return the counter of a stream; call the counter at each exchange, whether spans are kept or not."""
        if stream not in self._counts:
            self._counts[stream] = itertools.count().__next__
        return self._counts[stream]

    def batch(self, start: int) -> None:
        """Begin a step: a loader returned a batch that was requested at ``start``."""
        self._loops, self._patience = 0, _LOOPS
        self._step(start)

    def backward(self, start: int) -> None:
        """Begin a backward, and with it a step if no loader returns batches."""
        self._loops += 1
        if self._loops > self._patience:
            self._step(start)

    def finish(self) -> None:
        """End the program's last step."""
        self._end_step(self.clock())

    def _step(self, start: int) -> None:
        if self.keeps:
            self._end_step(start)
            self._step_at = start
            self.keeps = self._given + len(self._spans) < self._ends_at
        self.num_steps += 1
        if self.num_steps == self._closes_at:
            self.keeps, self._step_at = False, 0
        elif self.num_steps == self._opens_at:
            self._ends_at = min(_LATER_SPANS + self._num_spans, _ALL_SPANS)
            self._closes_at, self._opens_at = self._opens_at + LATER, 2 * self._opens_at
            self.keeps, self._step_at = self._num_spans < self._ends_at, start

    def _end_step(self, end: int) -> None:
        if self._step_at:
            self.append((STEP, "step", self._step_at, end, self.thread, 0, "", self.num_steps))
            self._step_at = 0

    @property
    def _num_spans(self) -> int:
        return self._given + len(self._spans)

    def blocks(self) -> Iterator[Timeline]:
        """Yield the spans recorded since the last time, as messages; in one thread at a time."""
        if self._num_spans >= self._ends_at:
            self.keeps = False  # in a program without steps, nothing else ends the recording
        while True:
            # Each of these two statements is atomic in Python; spans that are recorded meanwhile are appended behind.
            spans = self._spans[:_BLOCK]
            del self._spans[: len(spans)]
            self._given += len(spans)
            if spans:
                yield Timeline(rank=self.rank, data=self._packed(spans))
            if len(spans) < _BLOCK:
                return

    def _packed(self, spans: list[tuple[Any, ...]]) -> str:
        text = json.dumps(self._header | {"steps": self.num_steps, "spans": spans}, separators=(",", ":"))
        return base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def unpack_spans(data: str, most: int = 16 << 20) -> str:
    """Return the JSON text in ``data`` of a message that ``Spans.blocks`` yielded; it has at most ``most`` bytes.

    Raises:
        ValueError: when ``data`` is no such block, or its text is longer.
    """
    try:
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(base64.b64decode(data, validate=True), most)
        if not decompressor.eof:
            raise ValueError("a block of a timeline is too long, or cut off")
        return text.decode()
    except zlib.error as error:
        raise ValueError(f"a block of a timeline is damaged: {error}") from error


def clock_id() -> str:
    """Return a text that is equal in processes with the same monotonic clock."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    return f"{socket.gethostname()} {os.getpid()}"


_current: Spans | None = None


@contextmanager
def current(spans: Spans) -> Iterator[None]:
    """Let ``activity`` record into ``spans``."""
    global _current  # the run that this process is a rank of
    before, _current = _current, spans
    try:
        yield
    finally:
        _current = before


def current_spans() -> Spans | None:
    """Return the timeline of the run that this process is a rank of; None without one."""
    return _current


@contextmanager
def activity(row: str, name: str, size: int = 0) -> Iterator[None]:
    """Record the block as ``name`` on a row of its own, such as a tensor's; without a timeline, do nothing.

    The context may be entered in any thread, and left in another one.
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
        spans.keeps, spans._ends_at = False, 0
        spans._closes_at = spans._opens_at = -1


# A forked process, such as a loader worker, is no rank, so it records nothing.
os.register_at_fork(after_in_child=_forget)

# Note [What is kept]
#
# A run may take days, and a trace of more than some tens of MB is of no use. So the first 100 steps are kept, and then
# 20 steps each from the 200th, the 400th, the 800th ... on. All ranks take the same steps, and so keep the same steps:
# their exchanges can be compared. If a rank has too many spans (_FIRST_SPANS and the next two limits), it keeps fewer
# steps. In between, recording costs one check of a flag.
