"""``RingStream``: encrypted messages that go round a ring of hosts. ``csrc/ring.cpp`` sends those in clear."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.sockets.encryption import Connection

HEAD = struct.Struct("<QQBBII")
"""The header before a message; its second number is the message's size."""
BLOCK = 1 << 17
"""Bytes that are taken at once, and added while the next ones arrive; fewer are sent on at a message's end alone."""
_GRAIN = 1 << 15
"""Numbers that torch adds in the calling thread, at most."""
LATE = "another host did not answer in time"
HUNG_UP = "another host hung up"


class Outgoing(NamedTuple):
    """A message to the next host."""

    data: torch.Tensor
    """Its bytes."""
    after: int
    """Index of the incoming message whose bytes are sent on as they arrive; -1 for none."""


class Incoming(NamedTuple):
    """A message from the host before."""

    data: torch.Tensor
    """Memory that receives the bytes."""
    adds: bool
    """Whether the bytes are added, as numbers, to those in the memory."""


class DifferentMessageError(RuntimeError):
    """Another message came than the expected one.

    Attributes:
        found: its head.
        wanted: that of the expected one.
    """

    def __init__(self, found: bytes, wanted: bytes) -> None:
        super().__init__("another message came")
        self.found, self.wanted = found, wanted


class RingStream:
    """Sends and receives messages, each kind in its order.

    Args:
        following: a connection with the next host, which does not block.
        preceding: one with the host before.
        arrived: memory of ``BLOCK`` bytes for what is added.
        timeout_s: how long neither neighbour may move.
    """

    def __init__(self, following: Connection, preceding: Connection, arrived: torch.Tensor, timeout_s: float) -> None:
        self._following = following
        self._preceding = preceding
        self._arrived = arrived
        self._timeout_s = timeout_s
        self._polls: dict[tuple[bool, bool], select.poll] = {}

    def run(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        head: Callable[[int], bytes],
        dtype: torch.dtype,
    ) -> None:
        """Send and receive messages.

        Args:
            outgoing: messages to send.
            incoming: messages to receive.
            head: returns the header of a message of so many bytes.
            dtype: type of the numbers that are added.

        Raises:
            DifferentMessageError: when another message comes.
            TimeoutError: when neither neighbour has moved for so long.
            OSError: when one is gone.
        """
        backs = [_Receiving(one, head(one.data.nbytes), self._arrived.view(dtype)) for one in incoming]
        outs = [_Sending(one, head(one.data.nbytes), None if one.after < 0 else backs[one.after]) for one in outgoing]
        deadline = time.monotonic() + self._timeout_s
        comes, is_late = True, False
        while outs or backs:
            moved = bool(outs) and outs[0].go_on(self._following)
            if backs and comes:
                took = backs[0].go_on(self._preceding)
                moved, comes = moved or took, not backs[0].has_all
            if outs and outs[0].is_done:
                del outs[0]
            if backs and backs[0].is_done:
                del backs[0]
            if moved:
                deadline, is_late = time.monotonic() + self._timeout_s, False
            elif is_late:
                raise TimeoutError(LATE)
            elif outs or backs:
                sent = self._wait(bool(outs) and not outs[0].waits, bool(backs), deadline)
                is_late = sent is None
                comes = is_late or bool(sent)  # of less than is waited for, something may have come in that time

    def _wait(self, sends: bool, receives: bool, deadline: float) -> bool | None:
        """Wait until one neighbour has sent, or the other takes; return whether it is the first, None if too late."""
        number = self._preceding.fileno()
        if number < 0:
            raise ConnectionError("the connections between hosts are closed")
        poll = self._polls.get((sends, receives))
        if poll is None:
            wanted = {self._following.fileno(): select.POLLOUT} if sends else {}
            if receives:
                wanted[number] = wanted.get(number, 0) | select.POLLIN
            poll = self._polls[sends, receives] = select.poll()
            for one, events in wanted.items():
                poll.register(one, events)
        found = poll.poll(max(0.0, 1e3 * (deadline - time.monotonic())))
        return any(events & ~select.POLLOUT for one, events in found if one == number) if found else None


class _Sending:
    """A message on its way to the next host, as far as ``after`` has come, which arrives where it is read."""

    def __init__(self, message: Outgoing, head: bytes, after: _Receiving | None) -> None:
        self._memory = _memory(message.data)
        self._head = memoryview(head)
        self._size = len(self._head) + len(self._memory)
        self._sent = 0
        self._after = after

    @property
    def is_done(self) -> bool:
        """Return whether all is sent."""
        return self._sent == self._size

    @property
    def waits(self) -> bool:
        """Return whether too little has come for now: who is sent less wakes as often as for more."""
        return self._ready() - self._sent < min(BLOCK, self._size - self._sent)

    def go_on(self, peer: Connection) -> bool:
        """Send what has come and the kernel takes; return whether that is anything."""
        if self.waits:
            return False
        head = self._head[self._sent :]
        data = self._memory[max(0, self._sent - len(self._head)) : self._ready() - len(self._head)]
        try:
            self._sent += peer.sendmsg([head, data] if head else [data], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True

    def _ready(self) -> int:
        return self._size if self._after is None else len(self._head) + self._after.num_ready


class _Receiving:
    """A message on its way from the host before."""

    def __init__(self, message: Incoming, head: bytes, arrived: torch.Tensor) -> None:
        self.is_done = False
        self.has_all = False
        """Whether all that had come is taken."""
        self.num_ready = 0
        """Bytes that have come, and were added."""
        self._wanted = head
        self._head = bytearray()
        self._place = 0
        self._memory = _memory(message.data)
        self._sums = _Sums(self._memory, arrived) if message.adds and self._memory else None

    def go_on(self, peer: Connection) -> bool:
        """Take the bytes that are there; return whether there were any."""
        has_head = len(self._head) == HEAD.size
        try:
            if not has_head:
                asked = HEAD.size - len(self._head)
                data = peer.recv(asked)
                self._head += data
                count = len(data)
            else:
                left = self._memory[self._place :]
                room = left if self._sums is None else self._sums.room(len(left))
                asked, count = len(room), peer.recv_into(room)
                self._place += count
        except BlockingIOError:
            self.has_all = True
            return False
        if count == 0:
            raise ConnectionError(HUNG_UP)
        self.has_all = count < asked
        if len(self._head) == HEAD.size:
            if not has_head:
                if self._head != self._wanted:
                    raise DifferentMessageError(bytes(self._head), self._wanted)
                count = 0
            self.num_ready = self._place if self._sums is None else self._sums.add(count)
            self.is_done = self._place == len(self._memory)
        return True


class _Sums:
    """Numbers to which others are added as they arrive: in a small memory, which stays in the processor's cache."""

    def __init__(self, memory: memoryview, arrived: torch.Tensor) -> None:
        # Made of the memory itself: a tensor of the program may be of torch's inference mode.
        self._totals = torch.frombuffer(memory, dtype=arrived.dtype)
        self._others = arrived
        self._bytes = arrived.view(torch.uint8)
        self._memory = _memory(self._bytes)
        self._added = 0
        self._held = 0

    def room(self, most: int) -> memoryview:
        """Return the memory for the next bytes, at most ``most``."""
        return self._memory[self._held : self._held + most]

    def add(self, count: int) -> int:
        """Add the elements that are complete with ``count`` further bytes; return the bytes of all that are added."""
        self._held += count
        size = self._totals.element_size()
        num = self._held // size
        for start in range(0, num, _GRAIN):
            count = min(_GRAIN, num - start)
            # Not ``totals[i:j] += others``, which writes the sum over itself once more.
            self._totals.narrow(0, self._added + start, count).add_(self._others.narrow(0, start, count))
        self._added += num
        rest = self._bytes[num * size : self._held]
        self._held = len(rest)
        if self._held:
            self._bytes[: self._held] = rest.clone()
        return self._added * size


def _memory(data: torch.Tensor) -> memoryview:
    numbers: Any = data.numpy()
    return memoryview(numbers)
