"""``HostMessages``: exchanges in which each rank sends a message to all ranks, for ranks on several hosts."""

from __future__ import annotations

import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from lagom.exchange.hosts import BETWEEN, home_of_ranks, name_ranks
from lagom.exchange.sockets import connect
from lagom.exchange.sockets.mesh import Mesh
from lagom.exchange.sockets.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lagom.exchange.hosts import HostTransport
    from lagom.exchange.native import Communicator
    from lagom.exchange.sockets.connect import GatherTexts
    from lagom.exchange.sockets.encryption import Credentials
    from lagom.exchange.transport import Merge, Merging

_COMPARED = 4096
"""Most bytes of a message that is compared with the one before it, since equal messages in a row travel once."""
_DELAY = struct.Struct("<IQ")
_RUN = struct.Struct("<IQ")


class Delay(NamedTuple):
    """The time in nanoseconds that a rank has waited because of the rank ``rank``."""

    rank: int
    ns: int


Run = tuple[int, "bytes | bytearray | memoryview"]
"""A message, after the number of ranks that gave it, or whose bodies it merges; they are neighbours in host order."""


class HostMessages:
    """Exchanges messages through memory within a host, and by sockets between first ranks of hosts. See Note [Rounds].

    Args:
        near: communicator of the ranks of this host; None if this rank is alone there.
        between: mesh with the ranks that ``partners`` returns, which are none if this is not the first of its host.
        homes: the ranks of each host.
    """

    def __init__(self, near: Communicator | None, between: Mesh, homes: Sequence[Sequence[int]], rank: int) -> None:
        self._near = near
        self._between = between
        self._rank = rank
        self._homes = homes
        home = _home_of(homes, rank)
        self._own = homes[home]
        self._leads = self._own[0] == rank
        self._rounds = rounds(len(homes), home)
        self._order = [one for each in homes for one in each]
        self._waited_ns = [0] * len(self._order)
        self._waited_near_ns = [0] * len(self._own)
        self._longest = Delay(rank, 0)
        self._turn = threading.Lock()
        self._num = self._size = 0
        self._covered: dict[int, Sequence[int]] = {}
        self._failure = ""

    def exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """Return each rank's message, ``head`` and ``body`` in one, in rank order; lengths may differ.

        Views are valid until the next call. This rank's own entry is its ``head`` alone.

        Raises:
            OSError: on the first rank of a host, when a rank of another host is gone or did not answer in time.
            RuntimeError: when a rank of this host is gone or did not answer in time, and on all other ranks of a host
                whose first rank has failed.
        """
        return self._rows(self._runs(head, body, None), head)

    def merge(self, head: bytes, body: memoryview, merging: Merging) -> list[memoryview] | memoryview:
        """Return the bodies of all ranks merged into one, host by host; all ranks get the same bytes.

        If not all ranks give the same ``head``, return the messages of all ranks in rank order, as ``exchange`` does,
        but without the bodies behind this ``head``. Views and errors are as in ``exchange``.
        """
        runs = self._runs(head, body, merging)
        row = memoryview(runs[0][1])
        is_merged = len(runs) == 1 and row[: len(head)] == head and (len(row) > len(head) or not body)
        return row[len(head) :] if is_merged else self._rows(runs, head)

    @property
    def most_messages(self) -> int:
        """Most messages that any rank sends or reads in one exchange; equal on all ranks."""
        num = len(self._homes)
        return max(*(len(home) - 1 for home in self._homes), *(len(_receivers(num, host)) for host in range(num)))

    def waited(self) -> list[int]:
        """Return the nanoseconds that this rank has waited because of each other rank. Any thread may call this."""
        return list(self._waited_ns)

    def standing(self) -> tuple[str, int, list[int]]:
        """Return the exchange in which this rank waits, the exchange's number, and the ranks that have not joined it.

        While this rank waits for the first rank of another host, these are all ranks whose messages that first rank is
        to send. The text is empty when this rank does not wait. Any thread may call this at any time.
        """
        what = f"exchange of {self._size} bytes"
        text, _, missing = self._between.standing()
        if text:
            covered = self._covered
            return what, self._num, sorted(rank for first in missing for rank in covered.get(first, ()))
        text, number, places = ("", 0, []) if self._near is None else self._near.standing()
        missing = [self._own[place] for place in places]
        return (what, self._num, missing) if text.startswith("exchange") else (text, number, missing)

    def close(self) -> None:
        """Close the connections."""
        self._between.close()

    def _runs(self, head: bytes, body: memoryview | None, merging: Merging | None) -> list[Run]:
        """Return the messages of all ranks, in the order of their hosts; one message if ``merging`` could merge all."""
        with self._turn, self._together():
            self._num, self._size = self._num + 1, len(head) + (0 if body is None else len(body))
            self._longest = Delay(self._rank, 0)
            runs = self._gather(head, body)
            if self._leads:
                if merging is not None:
                    runs = _joined([[run] for run in runs], head, merging.of_ranks)
                runs = self._go_round(runs, head, merging)
            return runs if self._near is None else self._tell(self._near, runs)

    def _rows(self, runs: Sequence[Run], head: bytes) -> list[memoryview]:
        """Return each rank's message, in rank order."""
        rows = [memoryview(head)] * len(self._order)
        views = (view for count, row in runs for view in [memoryview(row)] * count)
        for rank, view in zip(self._order, views, strict=True):
            rows[rank] = view
        rows[self._rank] = memoryview(head)
        return rows

    def _gather(self, head: bytes, body: memoryview | None) -> list[Run]:
        """Return the messages of this host's ranks; only the first rank uses them."""
        own = head if body is None or not self._leads else bytearray().join((head, body))
        if self._near is None:
            return [(1, own)]
        _, *others = self._near.exchange(head, body)
        now = self._near.waited()
        for rank, before, after in zip(self._own, self._waited_near_ns, now, strict=True):
            self._count(Delay(rank, after - before))
        self._waited_near_ns = now
        return [(1, own), *((1, row) for row in others)]

    def _go_round(self, runs: list[Run], head: bytes, merging: Merging | None) -> list[Run]:
        """Return the messages of all ranks, given those of this host."""
        for one in self._rounds:
            senders = [self._homes[host][0] for host in one.senders]
            others = [block for i, block in enumerate(one.blocks) if i != one.own]
            self._covered = {
                sender: [rank for host in block for rank in self._homes[host]]
                for sender, block in zip(senders, others, strict=True)
            }
            message = self._pack(runs)
            before = self._between.waited()
            received = self._between.swap({self._homes[host][0]: message for host in one.receivers}, senders)
            after = self._between.waited()
            parts = []
            for sender, answer in zip(senders, received, strict=True):
                delay, theirs = _unpack(answer)
                self._count_for(sender, after[sender] - before[sender], delay)
                parts.append(theirs)
            parts.insert(one.own, runs)
            runs = _joined(parts, head, None if merging is None else merging.of_hosts)
        return runs

    def _tell(self, near: Communicator, runs: list[Run]) -> list[Run]:
        """Send ``runs``, the messages of all ranks, from this host's first rank to its other ranks; return them."""
        if self._leads:
            message = memoryview(self._pack(runs))
            near.exchange(b"", message)
            return _unpack(message)[1]
        delay, told = _unpack(near.exchange(b"", None)[0])
        now = near.waited()
        self._count_for(self._own[0], now[0] - self._waited_near_ns[0], delay)
        self._waited_near_ns = now
        return told

    def _pack(self, runs: Sequence[Run]) -> bytearray:
        """Return the longest delay and the messages as bytes; equal messages of neighbours become one with a count."""
        packed: list[bytes | bytearray | memoryview] = [_DELAY.pack(*self._longest)]
        count, last = 0, runs[0][1]
        for num, row in runs:
            if row is not last and not (len(row) == len(last) <= _COMPARED and bytes(row) == bytes(last)):
                packed += (_RUN.pack(count, len(last)), last)
                count, last = 0, row
            count += num
        packed += (_RUN.pack(count, len(last)), last)
        return bytearray().join(packed)

    def _count_for(self, sender: int, waited_ns: int, delay: Delay) -> None:
        """Count a wait for ``sender``.

        As much of the wait as ``delay``, the sender's own longest wait, counts for the rank that delayed the sender.
        """
        passed_on = min(waited_ns, delay.ns)
        self._count(Delay(delay.rank, passed_on))
        self._count(Delay(sender, waited_ns - passed_on))

    def _count(self, delay: Delay) -> None:
        if delay.rank == self._rank:  # the sender was late because it had waited for this rank itself
            return
        self._waited_ns[delay.rank] += delay.ns
        if delay.ns > self._longest.ns:
            self._longest = delay

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Make an exchange that fails on this rank fail on all ranks, and refuse every later exchange."""
        if self._failure:
            raise ConnectionError(self._failure)
        try:
            yield
        except BaseException as error:
            self._failure = name_ranks(str(error), self._own)
            self._between.close()
            if self._near is not None:
                self._near.abort(f"{BETWEEN}: {error}")
            if isinstance(error, RuntimeError):
                raise RuntimeError(self._failure) from error
            raise


def partners(homes: Sequence[Sequence[int]], rank: int) -> set[int]:
    """Return the ranks with which ``rank`` exchanges messages over sockets: some first ranks of other hosts."""
    home = _home_of(homes, rank)
    if homes[home][0] != rank:
        return set()
    return {homes[host][0] for one in rounds(len(homes), home) for host in (*one.senders, *one.receivers)}


def connect_messages(
    rank: int,
    ip: str,
    all_gather: GatherTexts,
    credentials: Credentials,
    timeout_s: float,
    hosts: HostTransport | None = None,
) -> Mesh | HostMessages:
    """Return a mesh of all ranks if they are on one host, else an exchange over their hosts; a collective.

    Args:
        ip: address at which other hosts reach this one.
        all_gather: gathers a text of every rank, here its host and the address at which it listens. These texts are not
            secret.
        credentials: key and certificates that the run's ranks share.
        timeout_s: how long an exchange will wait for a rank.
        hosts: the transport over several hosts; None if no ranks share memory, or all ranks are on one host.

    Raises:
        OSError: when a rank cannot be reached.
    """
    places: Sequence[object] = all_gather(connect.host_identity()) if hosts is None else home_of_ranks(hosts.homes)
    if len(set(places)) == 1:
        return Mesh(connect.connected(rank, None, places, ip, all_gather, credentials, "messages"), timeout_s)
    homes = [[one] for one in range(len(places))] if hosts is None else hosts.homes
    peers = connect.connected(rank, partners(homes, rank), places, ip, all_gather, credentials, "messages of hosts")
    between = Mesh(peers, timeout_s)
    return HostMessages(None if hosts is None else hosts.near, between, homes, rank)


def _receivers(num_hosts: int, host: int) -> list[int]:
    return [other for one in rounds(num_hosts, host) for other in one.receivers]


def _joined(parts: Sequence[list[Run]], head: bytes, merge: Merge | None) -> list[Run]:
    """Return all messages of ``parts``, in order; with ``merge``, one merged message if all ranks gave ``head``.

    If a rank gave another head, no more messages are merged, and those with this ``head`` lose their bodies.
    """
    runs = [run for part in parts for run in part]
    if merge is None:
        return runs
    size = len(head)
    rows = [memoryview(row) for _, row in runs]
    if len(runs) == len(parts) and all(len(row) == len(rows[0]) and row[:size] == head for row in rows):
        return [(sum(count for count, _ in runs), bytearray(head) + merge([row[size:] for row in rows]))]
    return [(count, row[:size] if row[:size] == head else row) for (count, _), row in zip(runs, rows, strict=True)]


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
# Each rank writes its message to the shared memory of its host, where the host's first rank reads it. First ranks then
# gather all messages in rounds: up to 8 hosts form a block, up to 8 blocks form a larger block, and so on. When all
# hosts of a block have each other's messages, each of them receives from one host of every neighbouring block. This is
# an all-gather by recursive multiplying (Ruefenacht, Bull and Booth, "Generalisation of recursive doubling for
# AllReduce", 2017). The sizes of blocks are as equal as the number of hosts allows. There are as few rounds as with
# blocks of 8, and as few messages as so many rounds allow: 8 hosts take one round of 7 messages, 16 hosts two rounds of
# 3, and 1,000 hosts four rounds with 19 in all. Ranks that are not first send nothing over sockets. At the end each
# first rank writes all messages into its host's memory.
#
# Bodies that can be merged, such as small gradients, are merged on the way: first the bodies of a host's ranks, in rank
# order, then those of the blocks of each round, in the order of their hosts. So a message is as large as the message of
# one rank, however many ranks there are. All hosts of a block merge it in the same order, so all ranks get the same
# bits.
#
# Equal messages of neighbours travel once, with a count. Ranks nearly always agree: then each host sends a single
# signature, however many ranks there are. When they disagree, every rank sees which ranks differ.
#
# A first rank may send late because it waited for another rank itself. So each message names the rank for which its
# sender has waited longest in this exchange, and the time. The receiver's wait counts for that rank up to this time,
# and only the rest counts for the sender.
