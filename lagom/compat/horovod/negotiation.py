"""``Negotiator``: has all ranks of a set do the same exchanges in the same order, whatever order they ask in.

See Note [Names].
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import torch

from lagom.compat.horovod.errors import HorovodInternalError
from lagom.compat.horovod.matching import Match, Told, batches, matched
from lagom.compat.horovod.stall import LOOK_S, Stall, crossed

if TYPE_CHECKING:
    from lagom.compat.horovod.entry import Entry
    from lagom.compat.horovod.exchange import Ranks
    from lagom.compat.horovod.notices import Notices

_FRAME = 2048
"""Bytes that a rank says in a round at first; longer texts take a second exchange, once."""
_PAUSE_S = (0.0005, 0.02)
"""Shortest and longest wait for something new, after a round in which nothing matched."""
_STUCK_S = 2.0
"""So long all ranks must have waited, each for what others do not ask for, until that is an error."""


class Negotiator:
    """Matches what this rank asks for with what the others do, and has it done, in a thread of its own.

    Args:
        notices: where ranks read of each other what they cannot say in a round.
    """

    def __init__(self, ranks: Ranks, notices: Notices) -> None:
        self._ranks = ranks
        self._notices = notices
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._waiting: list[str] = []
        self._version = 0
        self._stuck_since: float | None = None
        self._joined: threading.Event | None = None
        self._last_joined = -1
        self._have_joined: set[int] = set()
        self._closed = ""
        self._frame = _FRAME
        self._cycle_s = _milliseconds("HOROVOD_CYCLE_TIME", 1.0)
        self._stall = Stall(notices)
        self._thread: threading.Thread | None = None

    def submit(self, entry: Entry) -> None:
        """Ask for an exchange.

        Raises:
            HorovodInternalError: when one of that name is under way, or none are possible any more.
        """
        if self._ranks.size == 1:
            self._ranks.perform(matched([Told((entry.request,))]), {entry.request.name: entry})
            return
        name = entry.request.name
        with self._changed:
            self._check()
            if name in self._entries:
                raise HorovodInternalError(
                    f"{entry.request.kind} of {name!r} was asked for while another of that name is under way; "
                    "synchronize() that one first, or give this one a name of its own"
                )
            self._entries[name] = entry
            self._news()

    def wait(self, entry: Entry) -> None:
        """Until ``entry`` is done.

        Raises:
            HorovodInternalError: when it failed, or will never be.
        """
        if not entry.done.is_set():
            self._await(entry.done, entry.request.name)
        if entry.error is not None:
            raise HorovodInternalError(str(entry.error)) from entry.error
        entry.settle()

    def join(self) -> int:
        """Take part with zeros until all ranks have joined; returns the global rank that came last."""
        if self._ranks.size == 1:
            return self._ranks.members[0]
        joined = threading.Event()
        with self._changed:
            self._check()
            self._joined = joined
            self._news()
        self._await(joined, "join()")
        with self._changed:
            self._check()
            return self._ranks.members[self._last_joined]

    def close(self, why: str) -> None:
        """Take nothing more; what is under way fails."""
        with self._changed:
            self._closed = self._closed or why
            self._news()
        self._fail(HorovodInternalError(why))

    def _news(self) -> None:
        self._version += 1
        self._stuck_since = None
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="lagom-horovod", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise HorovodInternalError(self._closed)
        if os.getpid() != self._pid:
            raise HorovodInternalError(
                "this process was forked from a rank, such as a loader's worker is, and is none itself; exchange in "
                "the rank, before or after"
            )

    def _await(self, done: threading.Event, name: str) -> None:
        with self._changed:
            self._waiting.append(name)
            self._version += 1
            self._changed.notify_all()
        started = time.monotonic()
        try:
            while not done.wait(LOOK_S):
                self._look(name, time.monotonic() - started)
        finally:
            with self._changed:
                self._waiting.remove(name)

    def _look(self, name: str, seconds: float) -> None:
        """While waiting: raise when a rank is gone, or has been awaited for too long; say who it is."""
        with self._changed:
            pending = sorted(self._entries) + (["join()"] if self._joined is not None else [])
        for member in self._ranks.members:
            if why := self._notices.left(member):
                raise HorovodInternalError(f"{name!r} will never be done: {why}")
        self._stall.look(name, seconds, pending, self._ranks.members)

    def _run(self) -> None:
        pause = _PAUSE_S[0]
        try:
            while self._has_work():
                with self._changed:
                    told, version = self._told(), self._version
                answers = [Told.decode(data) for data in self._exchange(told.encode())]
                if self._serve(answers):
                    pause = _PAUSE_S[0]
                    continue
                with self._changed:
                    if self._waiting and self._stuck_since is None:
                        self._stuck_since = time.monotonic()
                    self._changed.wait_for(lambda seen=version: self._version != seen, pause)  # type: ignore[misc]
                pause = min(2 * pause, _PAUSE_S[1])
        except Exception as error:
            lost = HorovodInternalError(f"the ranks lost each other: {error}")
            with self._changed:
                self._closed = self._closed or str(lost)
            lost.__cause__ = error
            self._fail(lost)

    def _has_work(self) -> bool:
        """Wait for something to do; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._entries or self._joined is not None)
            if not self._waiting:
                # What follows within a moment goes along; who is waited for does not wait for more.
                self._changed.wait_for(lambda: self._closed or self._waiting, self._cycle_s)
            return not self._closed

    def _told(self) -> Told:
        waits = any(name in self._entries or name == "join()" for name in self._waiting)
        stuck = time.monotonic() - self._stuck_since if self._stuck_since is not None and waits else -1.0
        return Told(tuple(entry.request for entry in self._entries.values()), self._joined is not None, stuck)

    def _serve(self, told: list[Told]) -> bool:
        """Do what all ranks have asked for; False when there is nothing."""
        new = {rank for rank, each in enumerate(told) if each.joined} - self._have_joined
        if new:
            self._have_joined |= new
            self._last_joined = max(new)
        matches = matched(told)
        for batch in batches(matches):
            self._perform(batch)
        if not matches and len(self._have_joined) == len(told):
            with self._changed:
                joined, self._joined = self._joined, None
                self._have_joined = set()
            assert joined is not None
            joined.set()
            return True
        if not matches and all(each.stuck_s >= _STUCK_S for each in told if not each.joined):
            self._fail(HorovodInternalError(crossed(told, self._ranks.members)))
            return True
        return bool(matches)

    def _perform(self, batch: list[Match]) -> None:
        with self._changed:
            names = [match.first.name for match in batch if match.first.name in self._entries]
            # Taken out before it is done: the program may ask for the same name at once.
            entries = {name: self._entries.pop(name) for name in names}
            self._stuck_since = None
        self._ranks.perform(batch, entries)

    def _exchange(self, data: bytes) -> list[bytes]:
        """What all ranks say, in rank order."""
        while True:
            frame = torch.zeros(8 + self._frame, dtype=torch.uint8)
            frame[:8] = torch.tensor(list(len(data).to_bytes(8, "big")), dtype=torch.uint8)
            part = data[: self._frame]
            frame[8 : 8 + len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            frames = [bytes(each.numpy()) for each in self._ranks.all_gather(frame)]
            lengths = [int.from_bytes(each[:8], "big") for each in frames]
            if max(lengths) <= self._frame:
                return [each[8 : 8 + length] for each, length in zip(frames, lengths, strict=True)]
            self._frame = 1 << max(lengths).bit_length()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            entries, self._entries = list(self._entries.values()), {}
            joined, self._joined = self._joined, None
            self._stuck_since = None
        for entry in entries:
            entry.error = error
            entry.done.set()
        if joined is not None:
            joined.set()


def _milliseconds(variable: str, default: float) -> float:
    return float(os.environ.get(variable, default)) / 1000


# Note [Names]
#
# torch.distributed wants all ranks to call the same exchanges in the same order. Horovod does not: ranks ask by name,
# in any order, and an exchange begins when all have asked for it. That is needed: gradients become final in an order of
# the rank's own where forwards differ, and a rank that has joined must answer for names that it never asks for.
#
# So a thread of each rank tells the others, in rounds of one small all-gather, all names that its rank has asked for
# and that are not done. Everybody computes from what all have said which names are complete, in one order, and does
# those; reductions of one kind travel together in one flat tensor. A rank with nothing to ask for takes part in no
# round, and sleeps; the others then wait in theirs. A round begins when the program waits for something, or
# HOROVOD_CYCLE_TIME (1 ms) after it has asked, so that the gradients of a small model are one round.
#
# Nothing hangs. Where all ranks wait, each for what another does not ask for, a round shows it, and it is an error on
# all of them. A rank that ends says so where the others look while they wait. One that is busy otherwise is waited
# for, and named after HOROVOD_STALL_CHECK_TIME_SECONDS (60), as in Horovod; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS makes
# that an error.
