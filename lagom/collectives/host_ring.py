"""``HostRing``: exchanges of tensors between the first ranks of hosts, each connected with the next one."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.collectives.background import BackgroundExchanges
from lagom.collectives.native import TYPES, native
from lagom.collectives.sockets.ring_stream import (
    BLOCK,
    HEAD,
    HUNG_UP,
    LATE,
    DifferentMessageError,
    Incoming,
    Outgoing,
    RingStream,
)
from lagom.collectives.transport import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.background import Work
    from lagom.collectives.sockets.encryption import Connection

_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_NO_CODE = 255
_LATE, _GONE, _DIFFERS = range(1, 4)
"""Ends of an exchange that failed, numbered as ``Ending`` in ``csrc/ring.hpp``."""
_CLOSE_S = 1.0
_LONGEST_S = 1e6
"""Longest wait, in seconds: ``poll`` counts no more than 24 days."""


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
        self._timeout_s = min(timeout_s, _LONGEST_S)
        self._exchange = _Exchange(0, 0, torch.uint8, 0, 1)
        self._arrived = torch.empty(BLOCK, dtype=torch.uint8)
        self._is_encrypted = not (isinstance(following, socket.socket) and isinstance(preceding, socket.socket))
        self._is_closed = False
        self._thread = BackgroundExchanges("lagom-ring")
        for one in (following, preceding):
            one.setblocking(False)
        _all.add(self)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long exchanges that begin from now on wait for a neighbour."""
        self._timeout_s = min(timeout_s, _LONGEST_S)

    def all_reduce(self, tensor: torch.Tensor, num_pieces: int = 1) -> Work:
        """Begin to sum a contiguous ``tensor`` over the hosts, in place, to the same bits on all.

        Args:
            num_pieces: as for all exchanges, how many of them make up the caller's; hosts compare it.
        """
        return self._begin(partial(self._all_reduce, tensor), "all_reduce", tensor.dtype, num_pieces)

    def reduce_scatter(self, parts: Sequence[torch.Tensor], num_pieces: int = 1) -> Work:
        """Begin to sum ``parts``, one for each host, over the hosts; only this host's own part is then complete."""
        return self._begin(partial(self._reduce_scatter, parts), "reduce_scatter", parts[0].dtype, num_pieces)

    def all_gather(self, blocks: Sequence[torch.Tensor], num_pieces: int = 1) -> Work:
        """Begin to fill ``blocks``, one from each host, of which this host's own is given."""
        return self._begin(partial(self._all_gather, blocks), "all_gather", blocks[0].dtype, num_pieces)

    def broadcast(self, tensor: torch.Tensor, root: int, num_pieces: int = 1) -> Work:
        """Begin to overwrite a contiguous ``tensor`` with that of host ``root``."""
        return self._begin(partial(self._broadcast, tensor, root), "broadcast", tensor.dtype, num_pieces, root)

    def _begin(
        self, exchange: Callable[[], None], name: str, dtype: torch.dtype, num_pieces: int, root: int = 0
    ) -> Work:
        def run() -> None:
            self._exchange = _Exchange(self._exchange.number + 1, _NAMES.index(name), dtype, root, num_pieces)
            try:
                exchange()
            except OSError as error:
                if self._is_closed:
                    raise ConnectionError("the connections between hosts are closed") from error
                raise
            except DifferentMessageError as error:
                raise RuntimeError(
                    f"hosts differ in their exchanges: another one sends {_words(error.found)}, "
                    f"and this one expects {_words(error.wanted)}"
                ) from None

        return self._thread.later(run)

    def close(self) -> None:
        """End the connections, also under an exchange."""
        self._is_closed = True
        self._thread.close()
        for one in (self._following, self._preceding):
            with contextlib.suppress(OSError):  # the other end may have gone
                one.shutdown(socket.SHUT_RDWR)
        # The number of a closed file may be another file's already, and the thread still write to it.
        self._thread.join(_CLOSE_S)
        self._close_files()

    def leave(self) -> None:
        """Close the ring's connections in this process, a fork of the rank, which goes on with the ring."""
        self._is_closed = True
        self._thread.refuse()
        self._close_files()

    def _close_files(self) -> None:
        for one in (self._following, self._preceding):
            one.close()

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
        outs: list[Outgoing] = []
        backs: list[Incoming] = []
        for shift in shifts:
            after = len(backs) - 1
            if shift.given is not None:
                outs.append(Outgoing(bytes_of(shift.given.detach()), after))
            if shift.into is not None:
                backs.append(Incoming(bytes_of(shift.into.detach()), shift.adds))
        compiled, dtype = native(), self._exchange.dtype
        if compiled is None or self._is_encrypted:
            peers = RingStream(self._following, self._preceding, self._arrived, self._timeout_s)
            peers.run(outs, backs, self._exchange.head, dtype)
            return
        ending, error, found, wanted = compiled.stream(
            self._following.fileno(),
            self._preceding.fileno(),
            self._exchange.head(0),
            [(one.data.data_ptr(), one.data.nbytes, one.after) for one in outs],
            [(one.data.data_ptr(), one.data.nbytes, one.adds) for one in backs],
            TYPES.get(dtype, TYPES[torch.uint8]),  # of others nothing is summed
            self._arrived.data_ptr(),
            BLOCK,
            self._timeout_s,
        )
        if ending == _LATE:
            raise TimeoutError(LATE)
        if ending == _GONE:
            raise OSError(error, os.strerror(error)) if error else ConnectionError(HUNG_UP)
        if ending == _DIFFERS:
            raise DifferentMessageError(found, wanted)


class _Exchange(NamedTuple):
    """Facts of an exchange that neighbours compare, beside the size of each message."""

    number: int
    operation: int
    """Place in ``_NAMES``."""
    dtype: torch.dtype
    root: int
    num_pieces: int
    """Number of exchanges that make up the exchange of the caller."""

    def head(self, size: int) -> bytes:
        """Return the header of a message of ``size`` bytes."""
        return HEAD.pack(self.number, size, self.operation, TYPES.get(self.dtype, _NO_CODE), self.root, self.num_pieces)


def _words(head: bytes | bytearray) -> str:
    number, size, operation, code, root, num_pieces = HEAD.unpack(head)
    name = _NAMES[operation] if operation < len(_NAMES) else f"operation {operation}"
    types = [str(dtype).removeprefix("torch.") for dtype, one in TYPES.items() if one == code]
    of = f" of {types[0]}" if types else ""
    whole = f", one of {num_pieces} pieces" * (num_pieces > 1)
    return f"{size} bytes{of} as number {number}, {name}{whole}" + f" from host {root}" * (name == "broadcast")


class _Shift(NamedTuple):
    """One step of a host: the tensor that it sends on, and the one that receives, or adds, the tensor that comes."""

    given: torch.Tensor | None
    into: torch.Tensor | None
    adds: bool = False


_all: weakref.WeakSet[HostRing] = weakref.WeakSet()


def _forget_all() -> None:
    for ring in list(_all):
        ring.leave()


# A forked process closes its copies of the ring's connections. With them, a loader worker that outlives its rank would
# keep the other hosts waiting for that rank.
os.register_at_fork(after_in_child=_forget_all)


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
# ``csrc/ring.cpp`` does this without Python's lock, which a busy program gives back every 5 ms; ``RingStream`` does it
# for encrypted connections, with the same messages. A thread that wakes for each packet uses more of a core for that
# than for sums. So it waits for 128 KB, or for the rest of a message (SO_RCVLOWAT): a neighbour sends no less, but for
# what the kernel does not take at once.
#
# The connections are made as those of messages are: both ends prove that they know the run's key, and encrypt where
# Spark does.
