"""``HostTransport``: exchanges over several hosts, by shared memory in a host and one rank per host between them."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagom.exchange.background import DONE
from lagom.exchange.host_ring import HostRing
from lagom.exchange.native import OPERATIONS, TYPES
from lagom.exchange.sockets import connect
from lagom.exchange.transport import Transport, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lagom.exchange.background import CompletedWork
    from lagom.exchange.native import Communicator
    from lagom.exchange.sockets.connect import GatherTexts
    from lagom.exchange.sockets.encryption import Credentials

_PIECE = 4 << 20
"""Most bytes of a piece, except of large all-reduces. One piece travels between hosts while the next one is exchanged
within hosts; only reduce-scatters wait for each piece."""
_PART = 2 << 20
"""Most bytes for each host in a piece of a large all-reduce: a piece costs the latency twice for each host."""
_OVERLAPPED = 4
"""Fewest pieces of a large all-reduce, so that some travel between hosts while others are summed within hosts."""
_SUM = OPERATIONS["sum"]
BETWEEN = "the exchange between hosts failed"
_SUMMED = frozenset(TYPES)
"""Types that this transport sums; sums of the others go over gloo."""
_AVERAGED = frozenset(dtype for dtype in _SUMMED if dtype.is_floating_point)


class HostTransport(Transport):
    """Exchanges between the ranks of this host, and between the first ranks of all hosts. See Note [Several hosts].

    An exchange is done when its method returns.

    Args:
        near: communicator of the ranks of this host; None if this rank is alone there.
        ring: connects this rank with the first ranks of the neighbouring hosts; None if this rank is not the first of
            its host.
        homes: the ranks of each host.
    """

    # ``TensorCollectives`` makes reduces and the exchanges of lists out of the other four.
    operations = frozenset(
        {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "all_gather_list", "reduce_scatter_list"}
    )

    def __init__(
        self, near: Communicator | None, ring: HostRing | None, homes: Sequence[Sequence[int]], rank: int
    ) -> None:
        self.near = near
        self.ring = ring
        self.homes = homes
        self._where = {one: (i, place) for i, home in enumerate(homes) for place, one in enumerate(home)}
        self._home, self._place = self._where[rank]
        self._most = max(map(len, homes))

    def carries(self, operation: str, tensors: Sequence[torch.Tensor], reduction: str | None = "") -> bool:
        """Return whether ``operations`` has the operation, and the tensors are dense, on the CPU and fit the reduction.

        A sum takes types in ``_SUMMED``, an average types in ``_AVERAGED``; there are no other reductions here.
        """
        types = _SUMMED if reduction == "sum" else _AVERAGED if reduction == "avg" else frozenset()
        return super().carries(operation, tensors) and (reduction == "" or types.issuperset([t.dtype for t in tensors]))

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> CompletedWork:
        piece = max(_PIECE, min(len(self.homes) * _PART, tensor.nbytes // _OVERLAPPED))
        # If every rank is alone on its host, there are no sums within hosts to overlap with: one piece is enough.
        parts = tensor.view(-1).tensor_split(1 if self._most == 1 else max(-(-tensor.nbytes // piece), 1))
        with self._together():
            works = []
            for part in parts:
                if self.near is not None:
                    self.near.all_reduce(part.data_ptr(), part.numel(), TYPES[part.dtype], _SUM)
                works.append(self.ring.all_reduce(part, len(parts)) if self.ring is not None else None)
            for part, work in zip(parts, works, strict=True):
                if work is not None:
                    work.wait()
                if self.near is not None:
                    self.near.broadcast(part.data_ptr(), part.nbytes, 0)
        return self._averaged(tensor, reduction)

    def broadcast(self, tensor: torch.Tensor, root: int) -> CompletedWork:
        if not tensor.numel():
            return DONE
        home, place = self._where[root]
        parts = bytes_of(tensor).split(_PIECE)
        with self._together():
            works = []
            for part in parts:
                if self.near is not None and home == self._home:
                    self.near.broadcast(part.data_ptr(), part.nbytes, place)
                works.append(self.ring.broadcast(part, home, len(parts)) if self.ring is not None else None)
            for part, work in zip(parts, works, strict=True):
                if work is not None:
                    work.wait()
                if self.near is not None and home != self._home:
                    self.near.broadcast(part.data_ptr(), part.nbytes, 0)
        return DONE

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> CompletedWork:
        if not part.numel():
            return DONE
        rows = bytes_of(whole).view(len(self._where), -1)
        width = max(_PIECE // (len(self.homes) * self._most), 1)
        parts = bytes_of(part).split(width)
        with self._together():
            under_way = [self._gathered(one, len(parts)) for one in parts[:1]]
            for i, one in enumerate(parts):
                under_way += [self._gathered(following, len(parts)) for following in parts[i + 1 : i + 2]]
                blocks, work = under_way.pop(0)
                if work is not None:
                    work.wait()
                if self.near is not None:
                    self.near.broadcast(blocks.data_ptr(), blocks.nbytes, 0)
                for rank, (home, place) in self._where.items():
                    rows[rank, i * width : i * width + len(one)] = blocks[home, place]
        return DONE

    def _gathered(self, part: torch.Tensor, num_parts: int) -> tuple[torch.Tensor, Any]:
        """Begin to gather the ``part`` of every rank, one of ``num_parts``, on the first rank of each host.

        Returns:
            A tensor of shape (hosts, most ranks of a host, bytes), complete on first ranks when the work is done; and
            the work, None on other ranks.
        """
        blocks = torch.empty((len(self.homes), self._most, len(part)), dtype=torch.uint8, device="cpu")
        mine = blocks[self._home]
        if self.near is None:
            mine[0] = part
        else:
            self.near.gather(part.data_ptr(), mine.data_ptr() if self.ring is not None else 0, part.nbytes, 0)
        return blocks, None if self.ring is None else self.ring.all_gather(list(blocks), num_parts)

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor, reduction: str = "sum") -> CompletedWork:
        if not out.numel():
            return DONE
        flat = out.view(-1)
        rows = given.view(len(self._where), -1)
        order = [rank for home in self.homes for rank in home]
        width = max(_PIECE // (len(order) * out.element_size()), 1)
        with self._together():
            starts = range(0, len(flat), width)
            for start in starts:
                piece = torch.cat([rows[rank, start : start + width] for rank in order])
                self._scattered(flat[start : start + width], piece, len(starts))
        return self._averaged(out, reduction)

    def _averaged(self, total: torch.Tensor, reduction: str) -> CompletedWork:
        """Divide a sum by the number of ranks if the reduction is an average."""
        if reduction == "avg":
            total.detach().div_(len(self._where))
        return DONE

    def _scattered(self, out: torch.Tensor, piece: torch.Tensor, num_pieces: int) -> None:
        """Fill ``out`` with this rank's part of the sums of ``piece``, whose parts are ordered by host, then rank."""
        if self.near is not None:
            self.near.all_reduce(piece.data_ptr(), piece.numel(), TYPES[piece.dtype], _SUM)
        mine = None
        if self.ring is not None:
            sums = piece.split([len(home) * len(out) for home in self.homes])
            self.ring.reduce_scatter(sums, num_pieces).wait()
            mine = sums[self._home]
        if self.near is not None:
            self.near.scatter(0 if mine is None else mine.data_ptr(), out.data_ptr(), out.nbytes, 0)
        elif mine is not None:
            out.copy_(mine)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The other ranks of this host, and other hosts, wait for a message that will not come.
            if self.near is not None:
                self.near.abort(f"{BETWEEN}: {error}")
            if self.ring is not None:
                self.ring.close()
            if self.near is not None and isinstance(error, RuntimeError) and not str(error).startswith(BETWEEN):
                raise RuntimeError(name_ranks(str(error), self.homes[self._home])) from error
            raise

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long this rank waits for ranks of its host, and for neighbouring hosts."""
        if self.ring is not None:
            self.ring.set_timeout(timeout_s)
        if self.near is not None:
            self.near.set_timeout(timeout_s)

    def abort(self, rank: int) -> None:
        """Fail the exchanges in progress on this host's ranks; do nothing if this rank is alone there."""
        if self.near is not None:
            self.near.abort(f"rank {self._place} aborted its process group")

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
        if self.near is not None:
            self.near.close()


def name_ranks(text: str, home: Sequence[int]) -> str:
    """Replace rank numbers within the host ``home``, in an error text of shared memory, by the run's rank numbers."""
    known = {str(place): rank for place, rank in enumerate(home)}
    return re.sub(r"\brank (\d+)\b", lambda found: f"rank {known.get(found[1], found[1])}", text)


def connect_hosts(
    rank: int,
    homes: Sequence[Sequence[int]],
    near: Sequence[Communicator],
    number: int,
    ip: str,
    all_gather: GatherTexts,
    credentials: Credentials,
    timeout_s: float,
) -> list[HostTransport]:
    """Return ``number`` transports over the hosts; a collective.

    Args:
        homes: the ranks of each host.
        near: ``number`` communicators of the ranks of this host; empty if this rank is alone there.
        ip: address at which other hosts reach this one.
        all_gather: gathers a text of every rank before the ranks are connected.
        credentials: key and certificates that the run's ranks share.
        timeout_s: how long an exchange will wait for a neighbouring host.

    Raises:
        OSError: when the first rank of a neighbouring host cannot be reached.
    """
    firsts = [home[0] for home in homes]
    home = firsts.index(rank) if rank in firsts else None
    made = []
    for i in range(number):
        neighbours = [] if home is None else [firsts[(home + 1) % len(firsts)], firsts[home - 1]]
        places = home_of_ranks(homes)
        peers = connect.connected(rank, set(neighbours), places, ip, all_gather, credentials, f"ring {i} of hosts")
        ring = None
        if home is not None:
            following, preceding = (peers[one] for one in neighbours)
            assert following is not None
            assert preceding is not None
            ring = HostRing(following, preceding, home, len(homes), timeout_s)
        made.append(HostTransport(near[i] if near else None, ring, homes, rank))
    return made


def home_of_ranks(homes: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each rank, the index of its host in ``homes``."""
    return [number for _, number in sorted((rank, i) for i, home in enumerate(homes) for rank in home)]


# Note [Several hosts]
#
# An all-reduce has three steps. The ranks of a host sum their numbers in shared memory. The first ranks of all hosts
# sum these results in a ring. Each first rank then copies the total to the ranks of its host. So the traffic between
# hosts does not depend on the number of ranks per host: with n hosts, a host sends and receives 2 (n - 1) / n of the
# tensor's size (see Note [Ring] in host_ring.py). If a host has several ranks, large tensors go in pieces: one piece
# travels between hosts while the next is summed within a host. All ranks end with the same bits, since all copy the
# same sums.
