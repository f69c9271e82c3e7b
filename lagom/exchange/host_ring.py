"""``HostRing``: exchanges of tensors between the first ranks of hosts, each connected with the next one."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.exchange.background import BackgroundExchanges
from lagom.exchange.native import TYPES, native
from lagom.exchange.sockets.ring_stream import (
    BLOCK,
    HEAD,
    HUNG_UP,
    LATE,
    DifferentMessageError,
    Incoming,
    Outgoing,
    RingStream,
)
from lagom.exchange.transport import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.exchange.background import Work
    from lagom.exchange.sockets.encryption import Connection

_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_NO_CODE = 255
_LATE, _GONE, _DIFFERS = range(1, 4)
"""Ends of an exchange that failed, numbered as ``Ending`` in ``csrc/ring.hpp``."""
_CLOSE_S = 1.0
_LONGEST_S = 1e6
"""Longest wait, in seconds: ``poll`` counts no more than 24 days."""


class HostRing:
    """Runs exchanges in a background thread, in the order in which they were begun. See Note [Ring].

    Args:
        following: a connection with the first rank of the next host.
        preceding: a connection with the first rank of the host before; with two hosts the same as ``following``.
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
        self._exchange = _ExchangeFacts(0, 0, torch.uint8, 0, 1)
        self._arrived = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
        self._is_encrypted = not (isinstance(following, socket.socket) and isinstance(preceding, socket.socket))
        self._is_closed = False
        self._thread = BackgroundExchanges("lagom-ring")
        for one in (following, preceding):
            one.setblocking(False)
        _all.add(self)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long exchanges that the thread starts from now on wait for a neighbour."""
        self._timeout_s = min(timeout_s, _LONGEST_S)

    def all_reduce(self, tensor: torch.Tensor, num_pieces: int = 1) -> Work:
        """Begin to sum a contiguous ``tensor`` over the hosts, in place, to the same bits on all.

        Args:
            num_pieces: number of pieces into which the caller has cut its exchange, this one included; hosts compare
                the number. The other exchanges have this argument too.
        """
        return self._begin(partial(self._all_reduce, tensor), "all_reduce", tensor.dtype, num_pieces)

    def reduce_scatter(self, parts: Sequence[torch.Tensor], num_pieces: int = 1) -> Work:
        """Begin to sum ``parts``, one for each host, over the hosts; only this host's own part is then complete."""
        return self._begin(partial(self._reduce_scatter, parts), "reduce_scatter", parts[0].dtype, num_pieces)

    def all_gather(self, blocks: Sequence[torch.Tensor], num_pieces: int = 1) -> Work:
        """Begin an all-gather of ``blocks``, one for each host: send this host's own block, and fill the others."""
        return self._begin(partial(self._all_gather, blocks), "all_gather", blocks[0].dtype, num_pieces)

    def broadcast(self, tensor: torch.Tensor, root: int, num_pieces: int = 1) -> Work:
        """Begin to overwrite a contiguous ``tensor`` with the tensor of host ``root``."""
        return self._begin(partial(self._broadcast, tensor, root), "broadcast", tensor.dtype, num_pieces, root)

    def _begin(
        self, exchange: Callable[[], None], name: str, dtype: torch.dtype, num_pieces: int, root: int = 0
    ) -> Work:
        def run() -> None:
            self._exchange = _ExchangeFacts(self._exchange.number + 1, _NAMES.index(name), dtype, root, num_pieces)
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
        """Close the connections, even while an exchange runs."""
        self._is_closed = True
        self._thread.close()
        for one in (self._following, self._preceding):
            with contextlib.suppress(OSError):  # the other end may have closed the connection
                one.shutdown(socket.SHUT_RDWR)
        # Let the thread end first: a new file may get the descriptor of a closed one, and the thread would write to it.
        self._thread.join(_CLOSE_S)
        self._close_files()

    def leave(self) -> None:
        """Close the ring's connections in this process, a fork; the rank itself keeps them and uses the ring."""
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
        """Run ``shifts`` in order; each sends the bytes that the shift before it receives, as soon as they arrive."""
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
            TYPES.get(dtype, TYPES[torch.uint8]),  # tensors of other types are never summed
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


class _ExchangeFacts(NamedTuple):
    """Facts of an exchange that neighbours compare, beside the size of each message."""

    number: int
    operation: int
    """Index in ``_NAMES``."""
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
    """One step of a host: send ``given`` to the next host, and copy or add the tensor that arrives to ``into``."""

    given: torch.Tensor | None
    into: torch.Tensor | None
    adds: bool = False


_all: weakref.WeakSet[HostRing] = weakref.WeakSet()


def _forget_all() -> None:
    for ring in list(_all):
        ring.leave()


# Close a forked process's copies of the ring's connections: a loader worker that kept them open after the end of its
# rank would keep the other hosts waiting for that rank.
os.register_at_fork(after_in_child=_forget_all)


# Note [Ring]
#
# Each first rank sends to the next host and receives from the host before at the same time. An all-reduce over n hosts
# cuts the tensor into n parts. In each step a host sends one part, adds the part that arrives to its own, and sends the
# sum in the next step, beginning while it still arrives. After n - 1 steps each host has the complete sum of one part
# (reduce-scatter); n - 1 further steps bring these sums to all hosts (all-gather). So 2 (n - 1) / n of the tensor cross
# each connection (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). All
# hosts copy the same sums, so they have the same bits. No byte is overwritten before it is sent: the sum that arrives
# for a part contains the bytes that this host has sent. The header of a message has the number of the exchange, its
# operation, type, root and number of pieces, and the message's size, so hosts that call different exchanges get an
# error.
#
# ``csrc/ring.cpp`` runs this without the GIL, for which it could wait 5 ms in a busy program. ``RingStream`` sends the
# same messages over encrypted connections. A thread that wakes for each packet spends more time on waking than on sums.
# So ring.cpp waits until 128 KB, or the rest of a message, has arrived (SO_RCVLOWAT). The sender also waits until it
# has so many bytes, and sends fewer at once only if the kernel's buffer is full.
#
# Connections are proved and encrypted like those of ``Mesh``: see Note [Proofs of ranks] in sockets/handshake.py.
