"""``Negotiator``: lets all ranks of a set do the same exchanges in the same order, in whatever order they ask.

See Note [Names].
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import torch

from lagom.extensions.compat.horovod.exceptions import HorovodInternalError, WrongArguments
from lagom.extensions.compat.horovod.matching import Match, RankMessage, describe_deadlock, match, split_into_batches
from lagom.extensions.compat.horovod.notices import LOOK_S, StallCheck

if TYPE_CHECKING:
    from lagom.extensions.compat.horovod.exchange import Entry, Ranks
    from lagom.extensions.compat.horovod.notices import Notices

_FRAME_BYTES = 2048
"""Initial size of a message in a round, in bytes; a longer message takes a second exchange, and raises the size."""
_PAUSE_S = (0.0005, 0.02)
"""Shortest and longest pause after a round in which nothing matched."""
_DEADLOCK_S = 2.0
"""Seconds after which ranks that all wait for different names get an error."""


class Negotiator:
    """Matches this rank's requests with the other ranks' requests, and does the exchanges, in a thread of its own.

    A single rank does them in the thread that asks.
    """

    def __init__(self, ranks: Ranks, notices: Notices) -> None:
        self._ranks = ranks
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._waiting: list[str] = []
        self._version = 0
        self._stuck_since: float | None = None
        self._join: _Join | None = None
        self._last_joined = -1
        self._have_joined: set[int] = set()
        self._closed_reason = ""
        self._frame_bytes = _FRAME_BYTES
        self._cycle_s = float(os.environ.get("HOROVOD_CYCLE_TIME", 1.0)) / 1000
        self._stall_check = StallCheck(notices)
        self._thread: threading.Thread | None = None
        self._unnamed: Counter[str] = Counter()

    def next_name(self, kind: str) -> str:
        """Return the name of the next exchange that the program does not name; equal on all ranks."""
        self._unnamed[kind] += 1
        return f"{kind}.noname.{self._unnamed[kind] - 1}"

    def submit(self, entry: Entry) -> None:
        """Ask for an exchange.

        Raises:
            ValueError: when an exchange of the same name is under way.
            HorovodInternalError: when the negotiator is closed.
        """
        name = entry.request.name
        with self._changed:
            self._check_open()
            if name in self._entries:
                raise ValueError(
                    f"{entry.request.kind} of {name!r} was asked for while another of that name is under way; "
                    "synchronize() that one first, or give this one a name of its own"
                )
            self._entries[name] = entry
            self._wake()

    def wait(self, entry: Entry) -> None:
        """Wait until ``entry`` is done.

        Raises:
            ValueError: when a rank's arguments are wrong by themselves.
            HorovodInternalError: when the exchange failed or will never be done.
        """
        if not entry.done.is_set():
            self._wait_for(entry.done, entry.request.name)
        if isinstance(entry.error, WrongArguments):
            raise ValueError(str(entry.error)) from entry.error
        if entry.error is not None:
            raise HorovodInternalError(str(entry.error)) from entry.error
        entry.settle()

    def join(self, gpu: int) -> int:
        """Contribute zeros, on this ``gpu``, until all ranks have joined; return the global rank that joined last.

        Raises:
            HorovodInternalError: when the negotiator is or was closed, a rank has ended, or the ranks that have not
                joined wait for different names.
        """
        join = _Join()
        with self._changed:
            self._check_open()
            self._ranks.gpu_of_zeros = gpu
            self._join = join
            self._wake()
        self._wait_for(join.done, "join()")
        if join.error is not None:
            raise HorovodInternalError(str(join.error)) from join.error
        return self._ranks.members[join.last_rank]

    def close(self, reason: str) -> None:
        """Accept nothing more; exchanges that are under way fail."""
        with self._changed:
            self._closed_reason = self._closed_reason or reason
            self._wake()
        self._fail(HorovodInternalError(reason))

    def _wake(self) -> None:
        self._version += 1
        self._stuck_since = None
        if self._ranks.world_size == 1:
            if not self._closed_reason:
                self._serve([self._message()])
        elif self._thread is None and not self._closed_reason:
            self._thread = threading.Thread(target=self._run, name="lagom-horovod", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed_reason:
            raise HorovodInternalError(self._closed_reason)
        if os.getpid() != self._pid and self._ranks.world_size > 1:
            raise HorovodInternalError(
                "this process was forked from a rank, such as a loader's worker is, and is none itself; exchange in "
                "the rank, before or after"
            )

    def _wait_for(self, done: threading.Event, name: str) -> None:
        with self._changed:
            self._waiting.append(name)
            self._version += 1
            self._changed.notify_all()
        started = time.monotonic()
        try:
            while not done.wait(LOOK_S):
                with self._changed:
                    pending = sorted(self._entries) + (["join()"] if self._join is not None else [])
                self._stall_check.check(name, time.monotonic() - started, pending, self._ranks.members)
        finally:
            with self._changed:
                self._waiting.remove(name)

    def _run(self) -> None:
        pause = _PAUSE_S[0]
        try:
            while self._wait_for_work():
                with self._changed:
                    message, version = self._message(), self._version
                if self._serve([RankMessage.decode(data) for data in self._exchange(message.encode())]):
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
                self._closed_reason = self._closed_reason or str(lost)
            lost.__cause__ = error
            self._fail(lost)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to exchange; return False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed_reason or self._entries or self._join is not None)
            if not self._waiting:
                # Let requests that follow within a moment join this round, unless the program waits already.
                self._changed.wait_for(lambda: self._closed_reason or self._waiting, self._cycle_s)
            return not self._closed_reason

    def _message(self) -> RankMessage:
        waits = any(name in self._entries or name == "join()" for name in self._waiting)
        stuck_s = time.monotonic() - self._stuck_since if self._stuck_since is not None and waits else -1.0
        requests = tuple(entry.request for entry in self._entries.values())
        return RankMessage(requests, self._join is not None, stuck_s)

    def _serve(self, messages: list[RankMessage]) -> bool:
        """Do all exchanges that every rank has asked for, or end a join or a deadlock; return whether there was any."""
        joining = {rank for rank, message in enumerate(messages) if message.has_joined} - self._have_joined
        if joining:
            self._have_joined |= joining
            self._last_joined = max(joining)
        matches = match(messages)
        for batch in split_into_batches(matches):
            self._perform(batch)
        if matches:
            return True
        if len(self._have_joined) == len(messages):
            with self._changed:
                join, self._join = self._join, None
                self._have_joined = set()
            assert join is not None
            join.last_rank = self._last_joined
            join.done.set()
            return True
        if all(message.stuck_s >= _DEADLOCK_S for message in messages if not message.has_joined):
            self._have_joined = set()  # their join() fails too, and they may call it again
            self._fail(HorovodInternalError(describe_deadlock(messages, self._ranks.members)))
            return True
        return False

    def _perform(self, batch: list[Match]) -> None:
        with self._changed:
            names = [each.first.name for each in batch if each.first.name in self._entries]
            # Removed before they are done: the program may ask for the same names at once.
            entries = {name: self._entries.pop(name) for name in names}
            self._stuck_since = None
        self._ranks.perform(batch, entries)

    def _exchange(self, data: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order."""
        while True:
            frame = torch.zeros(8 + self._frame_bytes, dtype=torch.uint8)
            content = len(data).to_bytes(8, "big") + data[: self._frame_bytes]
            frame[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            frames = [bytes(each.numpy()) for each in self._ranks.all_gather(frame)]
            lengths = [int.from_bytes(each[:8], "big") for each in frames]
            if max(lengths) <= self._frame_bytes:
                return [each[8 : 8 + length] for each, length in zip(frames, lengths, strict=True)]
            self._frame_bytes = 1 << max(lengths).bit_length()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            entries, self._entries = list(self._entries.values()), {}
            join, self._join = self._join, None
            self._stuck_since = None
        for entry in entries:
            entry.error = error
            entry.done.set()
        if join is not None:
            join.error = error
            join.done.set()


class _Join:
    """A call of ``join`` that waits for the other ranks."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.last_rank = -1
        """Place of the rank that joined last, once ``done`` without an error."""


# Note [Names]
#
# torch.distributed wants all ranks to call the same exchanges in the same order. Horovod does not: ranks ask by name,
# in any order, and an exchange begins when all have asked for it. Programs need that: where forwards differ, gradients
# become final in another order on each rank, and a rank that has joined must answer for names that it never asks for.
#
# So a thread of each rank sends the names that its rank has asked for, and that are not done, in rounds of one small
# all-gather. From all messages every rank computes which exchanges all ranks have asked for, and does these, in one
# order; reductions of one kind travel together in one flat tensor. A rank without requests sleeps and joins no round;
# other ranks, whose round has begun, wait for it. A round begins when the program waits for something, or
# HOROVOD_CYCLE_TIME (1 ms) after a request, so that the gradients of a small model are one round. A single rank serves
# its own message at once.
#
# Nothing hangs. If all ranks wait, each for a name that another does not ask for, a round shows it, and all get an
# error. A rank that ends leaves a notice, which waiting ranks read. Other ranks wait for a busy rank, and name it after
# HOROVOD_STALL_CHECK_TIME_SECONDS (60), as in Horovod; after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, if that is set, the
# wait is an error.
