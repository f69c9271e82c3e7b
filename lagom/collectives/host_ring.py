"""``HostRing``: exchanges of tensors between the first ranks of hosts, each connected with the next one."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagom.collectives.background import BackgroundExchanges
from lagom.collectives.native import TYPES
from lagom.collectives.transport import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.background import Work
    from lagom.collectives.sockets.encryption import Connection

_HEAD = struct.Struct("<QQBBI")
_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_NO_CODE = 255
_BLOCK = 1 << 17
"""Bytes that are taken at once, and added while the next ones arrive."""
_GRAIN = 1 << 15
"""Numbers that torch adds in the calling thread, at most."""
_LEAST = 1 << 17
"""Bytes of a message, if it has as many, that must have come before they are sent on."""


class HostRing:
    """Runs exchanges in a thread of its own, in the order in which they are begun. See Note [Ring].

    Args:
        following: a connection with the first rank of the next host.
        preceding: a connection with the first rank of the host before; the same one if there are two hosts.
        home: number of this host.
        num_homes: number of hosts; at least 2.
        timeout_s: how long an exchange waits for a neighbour.
    """

    def __init__(
        self, following: Connection, preceding: Connection, home: int, num_homes: int, timeout_s: float
    ) -> None:
        self._following = following
        self._preceding = preceding
        self._home = home
        self._num = num_homes
        self._timeout_s = timeout_s
        self._exchange = _Exchange(0, 0, 0, 0)
        self._arrived = torch.empty(_BLOCK, dtype=torch.uint8)
        self._least = 1
        self._polls: dict[tuple[bool, bool], select.poll] = {}
        self._thread = BackgroundExchanges("lagom-ring")
        for one in (following, preceding):
            one.setblocking(False)
        _all.add(self)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long exchanges wait for a neighbour from now on."""
        self._timeout_s = timeout_s

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Begin to sum a contiguous ``tensor`` over the hosts, in place, to the same bits on all."""
        return self._begin(partial(self._all_reduce, tensor), "all_reduce", tensor.dtype)

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> Work:
        """Begin to sum ``parts``, one for each host, over the hosts; only this host's own part is then complete."""
        return self._begin(partial(self._reduce_scatter, parts), "reduce_scatter", parts[0].dtype)

    def all_gather(self, blocks: Sequence[torch.Tensor]) -> Work:
        """Begin to fill ``blocks``, one from each host, of which this host's own is given."""
        return self._begin(partial(self._all_gather, blocks), "all_gather", blocks[0].dtype)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to overwrite a contiguous ``tensor`` with that of host ``root``."""
        return self._begin(partial(self._broadcast, tensor, root), "broadcast", tensor.dtype, root)

    def _begin(self, exchange: Callable[[], None], name: str, dtype: torch.dtype, root: int = 0) -> Work:
        def run() -> None:
            number, code = self._exchange.number + 1, TYPES.get(dtype, _NO_CODE)
            self._exchange = _Exchange(number, _NAMES.index(name), code, root)
            exchange()

        return self._thread.later(run)

    def close(self) -> None:
        """End the connections, also under an exchange."""
        self._thread.close()
        for one in (self._following, self._preceding):
            one.close()
        self._polls.clear()  # the numbers of closed files may be other files' already

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        parts = tensor.view(-1).tensor_split(self._num)
        self._stream([*self._summing(parts), *self._gathering(parts)])

    def _reduce_scatter(self, parts: Sequence[torch.Tensor]) -> None:
        self._stream(self._summing(parts))

    def _all_gather(self, blocks: Sequence[torch.Tensor]) -> None:
        self._stream(self._gathering(blocks))

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        distance = (self._home - root) % self._num
        self._stream([_Shift(None, tensor)] * (distance > 0) + [_Shift(tensor, None)] * (distance < self._num - 1))

    def _summing(self, parts: Sequence[torch.Tensor]) -> list[_Shift]:
        return [_Shift(self._at(parts, -i - 1), self._at(parts, -i - 2), adds=True) for i in range(self._num - 1)]

    def _gathering(self, blocks: Sequence[torch.Tensor]) -> list[_Shift]:
        return [_Shift(self._at(blocks, -i), self._at(blocks, -i - 1)) for i in range(self._num - 1)]

    def _at(self, parts: Sequence[torch.Tensor], distance: int) -> torch.Tensor:
        return parts[(self._home + distance) % self._num]

    def _stream(self, shifts: Sequence[_Shift]) -> None:
        """Run ``shifts`` one after the other, but send of each what has come in the one before, as it comes."""
        outs: list[_Sending] = []
        backs: list[_Receiving] = []
        for shift in shifts:
            last = backs[-1] if backs else None
            if shift.given is not None:
                outs.append(_Sending(shift.given, self._exchange, last))
            if shift.into is not None:
                backs.append(_Receiving(shift.into, self._exchange, self._arrived if shift.adds else None))
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
                raise TimeoutError("another host did not answer in time")
            elif outs or backs:
                if backs:
                    self._wake_for(backs[0].num_awaited)
                sent = self._wait(bool(outs) and not outs[0].waits, bool(backs), deadline)
                is_late = sent is None
                comes = is_late or bool(sent)  # of less than is waited for, something may have come in that time

    def _wake_for(self, num_bytes: int) -> None:
        """Have ``poll`` wait for as many bytes: to wake for each packet takes as long as to add its numbers."""
        if num_bytes != self._least and isinstance(self._preceding, socket.socket):
            self._preceding.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._least = num_bytes

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


class _Exchange(NamedTuple):
    """Facts of an exchange that neighbours compare, beside the size of each message."""

    number: int
    operation: int
    """Place in ``_NAMES``."""
    dtype: int
    """As in ``native.TYPES``."""
    root: int

    def head(self, size: int) -> bytes:
        """Return what stands before a message of ``size`` bytes."""
        return _HEAD.pack(self.number, size, self.operation, self.dtype, self.root)


def _words(head: bytes | bytearray) -> str:
    number, size, operation, code, root = _HEAD.unpack(head)
    name = _NAMES[operation] if operation < len(_NAMES) else f"operation {operation}"
    types = [str(dtype).removeprefix("torch.") for dtype, one in TYPES.items() if one == code]
    of = f" of {types[0]}" if types else ""
    return f"{size} bytes{of} as number {number}, {name}" + f" from host {root}" * (name == "broadcast")


class _Shift(NamedTuple):
    """One step of a host: what it sends on, and where it puts, or adds, what comes; None for neither."""

    given: torch.Tensor | None
    into: torch.Tensor | None
    adds: bool = False


class _Sending:
    """A message on its way to the next host, as far as ``after`` has come, which arrives where it is read."""

    def __init__(self, tensor: torch.Tensor, exchange: _Exchange, after: _Receiving | None) -> None:
        self._memory = _memory(tensor)
        self._head = memoryview(exchange.head(len(self._memory)))
        self._size = len(self._head) + len(self._memory)
        self._sent = 0
        self._after = after

    @property
    def is_done(self) -> bool:
        """Return whether all is sent."""
        return self._sent == self._size

    @property
    def waits(self) -> bool:
        """Return whether too little has come for now."""
        return self._ready() - self._sent < min(_LEAST, self._size - self._sent)

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

    def __init__(self, tensor: torch.Tensor, exchange: _Exchange, arrived: torch.Tensor | None) -> None:
        self.is_done = False
        self.has_all = False
        """Whether all that had come is taken."""
        self.num_ready = 0
        """Bytes that have come, and were added."""
        self._wanted = exchange.head(tensor.nbytes)
        self._head = bytearray()
        self._place = 0
        self._memory = _memory(tensor)
        self._sums = _Sums(self._memory, tensor.dtype, arrived) if arrived is not None and tensor.nbytes else None

    @property
    def num_awaited(self) -> int:
        """Return for how many bytes it is worth while to wait."""
        # Of a message that is not the expected one, no more than the head may come.
        return _HEAD.size - len(self._head) or min(len(self._memory) - self._place, _BLOCK)

    def go_on(self, peer: Connection) -> bool:
        """Take the bytes that are there; return whether there were any."""
        has_head = len(self._head) == _HEAD.size
        try:
            if not has_head:
                asked = _HEAD.size - len(self._head)
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
            raise ConnectionError("another host hung up")
        self.has_all = count < asked
        if len(self._head) == _HEAD.size:
            if not has_head:
                self._check()
                count = 0
            self.num_ready = self._place if self._sums is None else self._sums.add(count)
            self.is_done = self._place == len(self._memory)
        return True

    def _check(self) -> None:
        if self._head != self._wanted:
            raise RuntimeError(
                f"hosts differ in their exchanges: another one sends {_words(self._head)}, "
                f"and this one expects {_words(self._wanted)}"
            )


class _Sums:
    """Numbers to which others are added as they arrive: in a small memory, which stays in the processor's cache."""

    def __init__(self, memory: memoryview, dtype: torch.dtype, arrived: torch.Tensor) -> None:
        # Made of the memory itself: a tensor of the program may be a parameter, or of torch's inference mode.
        self._totals = torch.frombuffer(memory, dtype=dtype)
        self._others = arrived.view(dtype)
        self._bytes = arrived
        self._memory = _memory(arrived)
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


_all: weakref.WeakSet[HostRing] = weakref.WeakSet()


def _close_all() -> None:
    for ring in list(_all):
        ring.close()


# Otherwise a loader worker that outlives its rank would keep the other hosts waiting for that rank.
os.register_at_fork(after_in_child=_close_all)


def _memory(tensor: torch.Tensor) -> memoryview:
    numbers: Any = bytes_of(tensor.detach()).numpy()
    return memoryview(numbers)


# Note [Ring]
#
# Each first rank sends to the next host and receives from the one before, both at once. To sum n parts, each host sends
# one part on, adds what arrives to another part and sends that on, as it arrives: after n - 1 steps each host has the
# sum of one part (reduce-scatter), which n - 1 further steps carry round (all-gather). So 2 (n - 1) / n of the tensor
# cross each connection, whatever n is (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
# workstations", 2009). All hosts copy the same sums, so they have the same bits. Nothing is overwritten before it is
# sent: what comes for a part was made of what this host has sent of it. Each message says its number, size, operation,
# type and root: hosts that call different exchanges get an error.
#
# A thread that wakes for each packet uses more of a core for that than for sums. So ``poll`` waits for 128 KB, or for
# the rest of a message (SO_RCVLOWAT): a neighbour sends no less, but for what the kernel does not take at once.
#
# The connections are made as those of messages are: both ends prove that they know the run's key, and encrypt where
# Spark does.
