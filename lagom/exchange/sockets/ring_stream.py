"""``RingStream``: messages that go round a ring of hosts; ``csrc/ring.cpp`` does the same for unencrypted sockets."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.exchange.sockets.encryption import Connection

HEAD = struct.Struct("<QQBBII")
"""The header of a message; its second number is the message's size."""
BLOCK = 1 << 17
"""Most bytes that are added at once, and fewest bytes for which a send begins, unless the message has fewer left."""
_GRAIN = 1 << 15
"""Most numbers that one addition of torch adds in the calling thread alone, without its thread pool."""
LATE = "another host did not answer in time"
HUNG_UP = "another host hung up"


class Outgoing(NamedTuple):
    """A message to the next host."""

    data: torch.Tensor
    """Bytes of the message."""
    after: int
    """Index of the incoming message whose bytes this message passes on as they arrive; -1 if all bytes are here."""


class Incoming(NamedTuple):
    """A message from the host before."""

    data: torch.Tensor
    """Memory that receives the bytes."""
    adds: bool
    """Whether the numbers that arrive are added to the numbers in ``data``, or overwrite them."""


class DifferentMessageError(RuntimeError):
    """The message that arrived is not the expected one.

    Attributes:
        found: header of the message that arrived.
        wanted: header of the expected message.
    """

    def __init__(self, found: bytes, wanted: bytes) -> None:
        super().__init__("another message came")
        self.found, self.wanted = found, wanted


class RingStream:
    """Sends messages to the next host and receives messages from the host before, both at the same time.

    Args:
        following: a non-blocking connection with the next host.
        preceding: a non-blocking connection with the host before.
        arrived: buffer of ``BLOCK`` bytes for numbers that are to be added.
        timeout_s: how long to wait when no byte can be sent or received.
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
            outgoing: messages to send, in this order.
            incoming: messages to receive, in this order.
            head: returns the header of a message, given the message's size in bytes.
            dtype: type of the numbers that are added.

        Raises:
            DifferentMessageError: when a message arrives whose header is not the expected one.
            TimeoutError: when no byte could be sent or received for ``timeout_s``.
            OSError: when a neighbour is gone.
        """
        backs = [_Receiving(one, head(one.data.nbytes), self._arrived.view(dtype)) for one in incoming]
        outs = [_Sending(one, head(one.data.nbytes), None if one.after < 0 else backs[one.after]) for one in outgoing]
        deadline = time.monotonic() + self._timeout_s
        comes, is_late = True, False
        while outs or backs:
            moved = bool(outs) and outs[0].advance(self._following)
            if backs and comes:
                took = backs[0].advance(self._preceding)
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
                comes = is_late or bool(sent)  # after a timeout try once more, as csrc/ring.cpp does

    def _wait(self, sends: bool, receives: bool, deadline: float) -> bool | None:
        """Wait until bytes can be received or sent; return whether they can be received, None at the deadline."""
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
        ready = poll.poll(max(0.0, 1e3 * (deadline - time.monotonic())))
        return any(events & ~select.POLLOUT for one, events in ready if one == number) if ready else None


class _Sending:
    """A message that is being sent; if it passes on ``after``, only the bytes that have arrived there can be sent."""

    def __init__(self, message: Outgoing, head: bytes, after: _Receiving | None) -> None:
        self._memory = _memory(message.data)
        self._head = memoryview(head)
        self._size = len(self._head) + len(self._memory)
        self._sent = 0
        self._after = after

    @property
    def is_done(self) -> bool:
        """Return whether all bytes are sent."""
        return self._sent == self._size

    @property
    def waits(self) -> bool:
        """Return whether less than a block can be sent now: for fewer bytes the receiver would wake more often."""
        return self._ready() - self._sent < min(BLOCK, self._size - self._sent)

    def advance(self, peer: Connection) -> bool:
        """Send as many bytes as have arrived and the kernel accepts; return whether any were sent."""
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
    """A message that is being received from the host before."""

    def __init__(self, message: Incoming, head: bytes, arrived: torch.Tensor) -> None:
        self.is_done = False
        self.has_all = False
        """Whether the last read has emptied the kernel's buffer."""
        self.num_ready = 0
        """Bytes that can be sent on: they have arrived and, if ``adds``, were added."""
        self._wanted = head
        self._head = bytearray()
        self._place = 0
        self._memory = _memory(message.data)
        self._sums = _Sums(self._memory, arrived) if message.adds and self._memory else None

    def advance(self, peer: Connection) -> bool:
        """Read the bytes that have arrived, and add them if needed; return whether there were any."""
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
    """Adds arriving numbers to those in ``memory``. They arrive in ``arrived``, a buffer that fits the CPU's cache."""

    def __init__(self, memory: memoryview, arrived: torch.Tensor) -> None:
        # A new tensor over the memory: the program's own may be an inference tensor, which forbids changes in place.
        self._totals = torch.frombuffer(memory, dtype=arrived.dtype)
        self._others = arrived
        self._bytes = arrived.view(torch.uint8)
        self._memory = _memory(self._bytes)
        self._added = 0
        self._held = 0

    def room(self, most: int) -> memoryview:
        """Return the part of the buffer that receives the next bytes, at most ``most``."""
        return self._memory[self._held : self._held + most]

    def add(self, count: int) -> int:
        """Add the elements that ``count`` further bytes complete; return the number of bytes added so far."""
        self._held += count
        size = self._totals.element_size()
        num = self._held // size
        for start in range(0, num, _GRAIN):
            count = min(_GRAIN, num - start)
            # Not ``totals[i:j] += others``, after which Python copies the sum onto itself.
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
