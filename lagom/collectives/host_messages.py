"""``HostMessages``: messages that each rank gives to all, where ranks are on several hosts."""

from __future__ import annotations

import struct
import threading
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from lagom.collectives.hosts import BETWEEN, name_ranks
from lagom.collectives.sockets import connect
from lagom.collectives.sockets.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lagom.collectives.hosts import HostTransport
    from lagom.collectives.native import Communicator
    from lagom.collectives.sockets.encryption import Credentials

_RADIX = 8
_COMPARED = 4096
"""Bytes up to which neighbours' messages are compared."""
_DELAY = struct.Struct("<IQ")
_RUN = struct.Struct("<IQ")


class Delay(NamedTuple):
    """The nanoseconds that a rank has waited because of one rank."""

    rank: int
    ns: int


Run = tuple[int, "bytes | memoryview"]
"""The number of neighbours that gave the same message, and the message."""


class HostMessages:
    """Exchanges messages within hosts through memory, and between their first ranks by sockets. See Note [Rounds].

    Args:
        near: communicator of the ranks of this host; None if this rank is alone there.
        between: connections with the ranks of ``partners``; without any if this is not the first rank of its host.
        homes: the ranks of each host.
    """

    def __init__(self, near: Communicator | None, between: Mesh, homes: Sequence[Sequence[int]], rank: int) -> None:
        self._near = near
        self._between = between
        self._rank = rank
        home = _home_of(homes, rank)
        self._leads = homes[home][0] == rank
        self._homes = [*homes[home:], *homes[:home]]
        self._order = [one for each in self._homes for one in each]
        self._waited_ns = [0] * len(self._order)
        self._waited_near_ns = [0] * len(homes[home])
        self._longest = Delay(rank, 0)
        self._turn = threading.Lock()
        self._num = self._size = 0
        self._covered: dict[int, Sequence[int]] = {}
        self._failure = ""

    def exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """Return each rank's message, ``head`` and ``body`` in one, in rank order; lengths may differ.

        Views are valid until the next call. This rank's own entry is its ``head`` alone.

        Raises:
            OSError: when a rank of another host is gone or did not answer in time.
            RuntimeError: when a rank of this host is gone or did not answer in time.
        """
        with self._turn, self._together():
            self._num, self._size = self._num + 1, len(head) + (0 if body is None else len(body))
            self._longest = Delay(self._rank, 0)
            runs = self._gather(head, body)
            if self._leads:
                runs = self._go_round(runs)
            if self._near is not None:
                runs = self._tell(self._near, runs)
        rows = [memoryview(head)] * len(self._order)
        ranks = iter(self._order)
        for count, row in runs:
            view = memoryview(row)
            for rank in islice(ranks, count):
                rows[rank] = view
        rows[self._rank] = memoryview(head)
        return rows

    def waited(self) -> list[int]:
        """Return the nanoseconds that this rank has waited because of each other rank. Any thread may call this."""
        return list(self._waited_ns)

    def standing(self) -> tuple[str, int, list[int]]:
        """Return the exchange in which this rank waits, its number, and the ranks that have not come.

        Ranks of other hosts are all those whose messages the awaited one will have. The text is empty when this rank
        does not wait. Any thread may call this at any time.
        """
        what = f"exchange of {self._size} bytes"
        text, _, missing = self._between.standing()
        if text:
            covered = self._covered
            return what, self._num, sorted(rank for first in missing for rank in covered.get(first, ()))
        text, number, places = ("", 0, []) if self._near is None else self._near.standing()
        missing = [self._homes[0][place] for place in places]
        return (what, self._num, missing) if text.startswith("exchange") else (text, number, missing)

    def close(self) -> None:
        """Close the connections."""
        self._between.close()

    def _gather(self, head: bytes, body: memoryview | None) -> list[Run]:
        """Return the messages of this host's ranks."""
        own = head if body is None or not self._leads else b"".join((head, body))
        if self._near is None:
            return [(1, own)]
        _, *others = self._near.exchange(head, body)
        now = self._near.waited()
        for rank, before, after in zip(self._homes[0], self._waited_near_ns, now, strict=True):
            self._count(Delay(rank, after - before))
        self._waited_near_ns = now
        return [(1, own), *((1, row) for row in others)]

    def _go_round(self, runs: list[Run]) -> list[Run]:
        """Return the messages of all ranks, from this host's on, given those of this host."""
        num = len(self._homes)
        step = 1
        while step < num:
            distances = range(step, min(num, step * _RADIX), step)
            widths = [min(step, num - distance) for distance in distances]
            parts = {width: self._pack(runs, sum(map(len, self._homes[:width]))) for width in set(widths)}
            senders = [self._homes[distance][0] for distance in distances]
            receivers = [self._homes[-distance][0] for distance in distances]
            self._covered = {
                sender: [rank for home in self._homes[distance : distance + width] for rank in home]
                for sender, distance, width in zip(senders, distances, widths, strict=True)
            }
            before = self._between.waited()
            messages = dict(zip(receivers, (parts[width] for width in widths), strict=True))
            received = self._between.swap(messages, senders)
            after = self._between.waited()
            for sender, message in zip(senders, received, strict=True):
                delay, theirs = _unpack(message)
                self._count_for(sender, after[sender] - before[sender], delay)
                runs += theirs
            step *= _RADIX
        return runs

    def _tell(self, near: Communicator, runs: list[Run]) -> list[Run]:
        """Return the messages of all ranks, which the first rank of this host has, on every rank of it."""
        if self._leads:
            message = memoryview(self._pack(runs, len(self._order)))
            near.exchange(b"", message)
            return _unpack(message)[1]
        delay, told = _unpack(near.exchange(b"", None)[0])
        now = near.waited()
        self._count_for(self._homes[0][0], now[0] - self._waited_near_ns[0], delay)
        self._waited_near_ns = now
        return told

    def _pack(self, runs: Sequence[Run], num_ranks: int) -> bytearray:
        """Return the messages of the first ``num_ranks`` of this host's order as bytes."""
        packed: list[bytes | memoryview] = [_DELAY.pack(*self._longest)]
        count, last = 0, runs[0][1]
        for num, row in runs:
            num = min(num, num_ranks)
            if row is not last and not (len(row) == len(last) <= _COMPARED and bytes(row) == bytes(last)):
                packed += (_RUN.pack(count, len(last)), last)
                count, last = 0, row
            count, num_ranks = count + num, num_ranks - num
            if num_ranks == 0:
                break
        packed += (_RUN.pack(count, len(last)), last)
        return bytearray().join(packed)

    def _count_for(self, sender: int, waited_ns: int, delay: Delay) -> None:
        """Count a wait for ``sender``, which itself had a ``delay``."""
        passed_on = min(waited_ns, delay.ns)
        self._count(Delay(delay.rank, passed_on))
        self._count(Delay(sender, waited_ns - passed_on))

    def _count(self, delay: Delay) -> None:
        if delay.rank == self._rank:  # a rank that waited for this one sent its message late for that reason
            return
        self._waited_ns[delay.rank] += delay.ns
        if delay.ns > self._longest.ns:
            self._longest = delay

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Let an exchange that fails on this rank fail on the others, now and from now on."""
        if self._failure:
            raise ConnectionError(self._failure)
        try:
            yield
        except BaseException as error:
            self._failure = name_ranks(str(error), self._homes[0])
            self._between.close()
            if self._near is not None:
                self._near.abort(f"{BETWEEN}: {error}")
            if isinstance(error, RuntimeError):
                raise RuntimeError(self._failure) from error
            raise


def partners(homes: Sequence[Sequence[int]], rank: int) -> set[int]:
    """Return the ranks with which ``rank`` exchanges messages over sockets: some first ranks of other hosts."""
    num, home = len(homes), _home_of(homes, rank)
    if homes[home][0] != rank:
        return set()
    found: set[int] = set()
    step = 1
    while step < num:
        for distance in range(step, min(num, step * _RADIX), step):
            found |= {homes[(home + distance) % num][0], homes[home - distance][0]}
        step *= _RADIX
    return found


def connect_messages(
    rank: int,
    ip: str,
    all_gather: Callable[[bytes], list[bytes]],
    credentials: Credentials,
    timeout_s: float,
    hosts: HostTransport | None = None,
) -> Mesh | HostMessages:
    """Return a mesh of all ranks if they are on one host, else an exchange over their hosts; a collective.

    Args:
        ip: address at which other hosts reach this one.
        all_gather: an exchange that works already; whoever reads its messages learns where ranks listen.
        credentials: those of the run's ranks.
        timeout_s: how long an exchange will wait for a rank.
        hosts: carries tensors by the memory of several hosts; None if no ranks share memory.

    Raises:
        OSError: when a rank cannot be reached.
    """
    places = all_gather(connect.host_identity())
    if len(set(places)) == 1 and hosts is None:
        everyone = set(range(len(places))) - {rank}
        return Mesh(connect.connected(rank, everyone, places, ip, all_gather, credentials), timeout_s)
    homes = [[one] for one in range(len(places))] if hosts is None else hosts.homes
    between = Mesh(connect.connected(rank, partners(homes, rank), places, ip, all_gather, credentials), timeout_s)
    return HostMessages(None if hosts is None else hosts.near, between, homes, rank)


def _home_of(homes: Sequence[Sequence[int]], rank: int) -> int:
    return next(i for i, home in enumerate(homes) if rank in home)


def _unpack(message: memoryview) -> tuple[Delay, list[Run]]:
    """Return the longest delay of the sender and the messages of ``_pack``."""
    delay = Delay(*_DELAY.unpack_from(message))
    runs: list[Run] = []
    place = _DELAY.size
    while place < len(message):
        count, size = _RUN.unpack_from(message, place)
        place += _RUN.size + size
        runs.append((count, message[place - size : place]))
    return delay, runs


# Note [Rounds]
#
# The ranks of a host give each other their messages through shared memory, in which the first of them reads them. First
# ranks then gather all messages in rounds (Bruck et al., "Efficient algorithms for all-to-all communications in
# multiport message-passing systems", 1997, with radix 8): when a host has the messages of the s hosts from itself on,
# it sends them to the hosts s, 2s, ... 7s before it, and gets those of the hosts s, 2s, ... 7s after it. For 8 hosts
# that is one round of 7 messages; 1,000 hosts take 4 rounds, 22 messages and 44 sockets. Ranks that are not first have
# no socket. At the end each first rank writes all messages into its host's memory.
#
# Equal messages of neighbours travel once, with a count. Where ranks agree, which is nearly always, each host sends one
# signature, however many ranks there are; where they do not, all see who differs.
#
# Who waits for a first rank may wait because of another one. So each message says for which rank its sender has waited
# longest in this exchange, and how long; the wait for the sender counts for that rank up to this time.
