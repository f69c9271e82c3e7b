"""``TwinSets``: the sleeping twins of all ranks of a host, from their fork to the moment that they are woken or ended.

See Note [Sleeping twins] in restart/sleeping_twin.py.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lagom.host.driver_link import DriverLink
from lagom.restart.sleeping_twin import MAX_PACKET

Packet = dict[str, Any]
_MEET_S = 1.0
"""Time for all ranks to come to a point (a place for forks); if some are late, none forks."""
_HOLD_S = 1.0
"""Time for the end of a rank to be seen after another's exchange has failed."""
_ANSWER_S = 5.0
"""Time for a twin to look at its files."""


@dataclass(slots=True)
class TwinSet:
    """The twins of all ranks, forked at one point."""

    number: int
    place: Sequence[int]
    """Backwards, epoch and step at which they were forked."""
    store_length: int
    began: float = field(default_factory=time.time)
    beds: dict[int, socket.socket] = field(default_factory=dict)
    """Connections to the twins, by rank."""
    pids: dict[int, int] = field(default_factory=dict)
    grown: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict)
    """Files that ranks have appended to since the point, by path: device and inode, and the length at the point."""

    def has_same_files(self) -> bool:
        """Return whether files have only grown, as far as their names and lengths tell."""
        for path, (identity, size) in self.grown.items():
            try:
                status = os.stat(path)
            except OSError:
                return False
            if [status.st_dev, status.st_ino] != list(identity) or status.st_size < size:
                return False
        return True

    def fits(self) -> bool:
        """Ask the twins; return whether the files that were open at their fork have only grown."""
        try:
            for bed in self.beds.values():
                bed.settimeout(_ANSWER_S)
                bed.send(b"{}")
            return all(json.loads(bed.recv(MAX_PACKET) or b"{}").get("fits", False) for bed in self.beds.values())
        except OSError:  # one has ended, or does not answer
            return False

    def cut_files(self, store: str) -> None:
        """Cut files, and the ranks' ``store``, to their length at the point."""
        for path, (_, size) in self.grown.items():
            os.truncate(path, size)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(store, self.store_length)

    def close(self) -> None:
        """End the twins."""
        for bed in self.beds.values():
            bed.close()


class TwinSets:
    """Keeps the last complete set of sleeping twins, and collects the set that is being forked.

    Args:
        ranks: all ranks of the run.
        store: path of the ranks' store.
        losses_left: how many losses the run may go on after.
        driver: told when a set is whole, and the reason when ranks cannot have twins.
        mark: called when all ranks are at a point, before they fork, with the number of the set to be forked, and with
            that of the oldest set whose mark is still needed.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        store: str,
        losses_left: int,
        selector: selectors.BaseSelector,
        driver: DriverLink,
        mark: Callable[[int, int], None],
    ) -> None:
        memory = os.memfd_create("lagom-twins")
        os.ftruncate(memory, mmap.PAGESIZE)
        self.due = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("q")
        os.close(memory)
        self._ranks, self._store, self._selector = list(ranks), store, selector
        self._driver, self._mark = driver, mark
        self.losses_left = losses_left
        self._channels: dict[int, socket.socket] = {}
        self._at: dict[int, Packet] = {}
        self._meet_by = 0.0
        self._refused = -1
        self._held: dict[int, float] = {}
        self._whole: TwinSet | None = None
        self._made: TwinSet | None = None
        self._num_sets = 0

    def add(self, rank: int, channel: socket.socket) -> None:
        """Hear ``rank`` on ``channel``."""
        channel.setblocking(False)
        self._channels[rank] = channel
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._read(rank, channel))

    @property
    def may_wake(self) -> bool:
        """Whether the run may go on after another loss."""
        return self.losses_left > 0

    def pids(self) -> list[int]:
        """Return the processes of all twins."""
        return [pid for one in (self._whole, self._made) if one is not None for pid in one.pids.values()]

    def next_look(self) -> float | None:
        """Return when ``look`` is due; None if nobody waits."""
        times = [*self._held.values(), *([self._meet_by] if self._at else [])]
        return min(times) if times else None

    def look(self, release: bool) -> None:
        """Answer ranks that have waited for long enough; with ``release`` all whose exchange has failed."""
        now = time.monotonic()
        if self._at and now >= self._meet_by:
            self._answer_all(0)
        for rank in [rank for rank, end in self._held.items() if release or now >= end]:
            del self._held[rank]
            self._send(rank, {})

    def take(self) -> TwinSet | None:
        """Return the twins that can go on now that all ranks are killed; None if there are none.

        The other twins are ended, files are cut to their lengths at the point, and the loss is counted.
        """
        for rank, channel in list(self._channels.items()):
            self._read(rank, channel)
            self._forget(channel)
        self._channels.clear()
        self._at.clear()
        self._held.clear()
        found, self._whole = self._whole, None
        self._end(self._made)
        self._made = None
        if found is None or not found.has_same_files() or not found.fits():
            self._end(found)
            return None
        for bed in found.beds.values():
            self._selector.unregister(bed)
        found.cut_files(self._store)
        self.losses_left -= 1
        return found

    def close(self) -> None:
        """End all twins, and close the connections to the ranks."""
        for one in (self._whole, self._made):
            self._end(one)
        self._whole = self._made = None
        for channel in self._channels.values():
            self._forget(channel)
        self._channels.clear()

    def _read(self, rank: int, channel: socket.socket) -> None:
        for message, fds in _packets(channel):
            if message is None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(channel)
                return
            self._hear(rank, message, fds)

    def _hear(self, rank: int, message: Packet, fds: list[int]) -> None:
        kind = message["what"]
        if kind == "at":
            self._come(rank, message)
        elif kind == "forked":
            self._forked(rank, message, socket.socket(fileno=fds[0]))
        elif kind == "rewrites":
            for one in (self._whole, self._made):
                self._end(one)
            self._whole = self._made = None
        elif kind == "grows":
            for one in filter(None, (self._whole, self._made)):
                one.grown.setdefault(message["path"], (message["is"], message["size"]))
        elif kind == "broken":
            self._held[rank] = time.monotonic() + _HOLD_S

    def _come(self, rank: int, message: Packet) -> None:
        if message["place"][0] <= self._refused:
            self._send(rank, {"number": 0})
            return
        if not self._at:
            self._meet_by = time.monotonic() + _MEET_S
        self._at[rank] = message
        if len(self._at) < len(self._ranks):
            return
        places = [one["place"] for one in self._at.values()]
        why = next((one["obstacle"] for one in self._at.values() if one["obstacle"]), "")
        if why:
            self._driver.send({"type": "no_twins", "why": why})
        if why or self.losses_left <= 0 or any(place != places[0] for place in places):
            self._answer_all(0)
            return
        self._end(self._made)
        self._num_sets += 1
        self._mark(self._num_sets, self._whole.number if self._whole is not None else self._num_sets)
        length = os.path.getsize(self._store) if os.path.exists(self._store) else 0
        self._made = TwinSet(self._num_sets, places[0], length)
        self._answer_all(self._num_sets)

    def _answer_all(self, number: int) -> None:
        if number == 0:
            self._refused = max(one["place"][0] for one in self._at.values())
        for rank in self._at:
            self._send(rank, {"number": number})
        self._at.clear()

    def _forked(self, rank: int, message: Packet, bed: socket.socket) -> None:
        one = self._made
        if one is None or one.number != message["number"] or message["why"]:
            bed.close()
            if message["why"]:
                self._driver.send({"type": "no_twins", "why": message["why"]})
                self._end(one)
                self._made = None
            return
        bed.setblocking(False)
        one.beds[rank] = bed
        self._selector.register(bed, selectors.EVENT_READ, lambda: self._read_twin(one, rank, bed))

    def _read_twin(self, one: TwinSet, rank: int, bed: socket.socket) -> None:
        for message, _ in _packets(bed):
            if message is None:  # it was killed
                for each in (self._whole, self._made):
                    if each is one:
                        self._end(one)
                self._whole = None if self._whole is one else self._whole
                self._made = None if self._made is one else self._made
                return
            one.pids[rank] = message["pid"]
        if len(one.pids) == len(self._ranks) and one is self._made:
            self._end(self._whole)
            self._whole, self._made = one, None
            self._driver.send({"type": "twins", "number": one.number, "place": one.place})

    def _end(self, one: TwinSet | None) -> None:
        for bed in one.beds.values() if one is not None else ():
            with contextlib.suppress(KeyError):
                self._selector.unregister(bed)
            bed.close()

    def _send(self, rank: int, message: Packet) -> None:
        with contextlib.suppress(OSError, KeyError):
            self._channels[rank].send(json.dumps(message).encode())

    def _forget(self, channel: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(channel)
        channel.close()


def _packets(channel: socket.socket) -> Iterator[tuple[Packet | None, list[int]]]:
    """Yield the packets that have arrived, with their files; None at the end of the connection."""
    while channel.fileno() >= 0:
        try:
            data, fds, _, _ = socket.recv_fds(channel, MAX_PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        yield (json.loads(data) if data else None), list(fds)
        if not data:
            return
