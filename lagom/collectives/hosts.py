"""``HostExchanges``: exchanges over several hosts, by shared memory in a host and one rank per host between them."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagom.collectives.native import OPERATIONS, TYPES
from lagom.collectives.shared_memory import shared_by_host
from lagom.collectives.tensor_ops import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lagom.collectives.native import Communicator

_PIECE = 4 << 20
"""Bytes that travel between hosts while the next ones are summed within them."""
_SUM = OPERATIONS["sum"]
_TAG = 7
_BETWEEN = "the exchange between hosts failed"


class HostExchanges:
    """Exchanges between the ranks of this host, and between the first ranks of all hosts. See Note [Several hosts].

    Args:
        near: communicator of the ranks of this host; None if this is the only one.
        leaders: a process group of the first ranks of all hosts; None on other ranks.
        homes: the ranks of each host.
    """

    def __init__(self, near: Communicator | None, leaders: Any, homes: Sequence[Sequence[int]], rank: int) -> None:
        self.near = near
        self.leaders = leaders
        self._homes = homes
        self._where = {one: (i, place) for i, home in enumerate(homes) for place, one in enumerate(home)}
        self._home, self._place = self._where[rank]
        self._most = max(map(len, homes))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous ``tensor`` over the ranks of all hosts, in place, to the same bits on all.

        Raises:
            RuntimeError: when a rank is gone, or ranks differ.
        """
        parts = tensor.view(-1).split(max(_PIECE // tensor.element_size(), 1)) if tensor.numel() else [tensor]
        with self._together():
            works = []
            for part in parts:
                if self.near is not None:
                    self.near.all_reduce(part.data_ptr(), part.numel(), TYPES[part.dtype], _SUM)
                works.append(self.leaders.allreduce([part]) if self.leaders is not None else None)
            for part, work in zip(parts, works, strict=True):
                if work is not None:
                    work.wait()
                if self.near is not None:
                    self.near.broadcast(part.data_ptr(), part.nbytes, 0)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite a contiguous ``tensor`` with the one of rank ``root``.

        Raises:
            RuntimeError: as ``all_reduce``.
        """
        if not tensor.numel():
            return
        home, place = self._where[root]
        parts = bytes_of(tensor).split(_PIECE)
        with self._together():
            works = []
            for part in parts:
                if self.near is not None and home == self._home:
                    self.near.broadcast(part.data_ptr(), part.nbytes, place)
                works.append(self.leaders.broadcast(part, home) if self.leaders is not None else None)
            for part, work in zip(parts, works, strict=True):
                if work is not None:
                    work.wait()
                if self.near is not None and home != self._home:
                    self.near.broadcast(part.data_ptr(), part.nbytes, 0)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Gather the ``part`` of every rank into ``whole``, one behind the other; contiguous, and all of one size.

        Raises:
            RuntimeError: as ``all_reduce``.
        """
        if not part.numel():
            return
        rows = bytes_of(whole).view(len(self._where), -1)
        width = max(_PIECE // (len(self._homes) * self._most), 1)
        parts = bytes_of(part).split(width)
        with self._together():
            under_way = [self._gathered(one) for one in parts[:1]]
            for i, one in enumerate(parts):
                under_way += [self._gathered(following) for following in parts[i + 1 : i + 2]]
                blocks, work = under_way.pop(0)
                if work is not None:
                    work.wait()
                if self.near is not None:
                    self.near.broadcast(blocks.data_ptr(), blocks.nbytes, 0)
                for rank, (home, place) in self._where.items():
                    rows[rank, i * width : i * width + len(one)] = blocks[home, place]

    def _gathered(self, part: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to gather ``part`` of all ranks on each host's first rank.

        Returns:
            A tensor of shape (hosts, ranks of a host, bytes), complete on first ranks when the work is done; and the
            work, None on other ranks.
        """
        blocks = torch.empty((len(self._homes), self._most, len(part)), dtype=torch.uint8)
        mine = torch.empty(blocks.shape[1:], dtype=torch.uint8)
        if self.near is None:
            mine[0] = part
        else:
            self.near.gather(part.data_ptr(), mine.data_ptr() if self.leaders is not None else 0, part.nbytes, 0)
        if self.leaders is None:
            return blocks, None
        return blocks, self.leaders._allgather_base(blocks.view(-1), mine.view(-1))

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor) -> None:
        """Fill ``out`` with this rank's part of the sums of all ranks' ``given``; contiguous.

        Raises:
            RuntimeError: as ``all_reduce``.
        """
        if not out.numel():
            return
        flat = out.view(-1)
        rows = given.view(len(self._where), -1)
        order = [rank for home in self._homes for rank in home]
        width = max(_PIECE // (len(order) * out.element_size()), 1)
        with self._together():
            for start in range(0, len(flat), width):
                piece = torch.cat([rows[rank, start : start + width] for rank in order])
                self._scattered(flat[start : start + width], piece)

    def _scattered(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        """Fill ``out`` with this rank's part of the sums of ``piece``, in which ranks are ordered by host."""
        if self.near is not None:
            self.near.all_reduce(piece.data_ptr(), piece.numel(), TYPES[piece.dtype], _SUM)
        if self.leaders is None:
            assert self.near is not None
            self.near.scatter(0, out.data_ptr(), out.nbytes, 0)
            return
        sizes = [len(home) * len(out) for home in self._homes]
        sums = [torch.empty(sizes[self._home], dtype=piece.dtype) for _ in sizes]
        self._deal(list(piece.split(sizes)), sums)
        for other in sums[1:]:  # in the order of hosts: the bits are then the same on every leader
            sums[0].add_(other)
        if self.near is None:
            out.copy_(sums[0])
        else:
            self.near.scatter(sums[0].data_ptr(), out.data_ptr(), out.nbytes, 0)

    def _deal(self, blocks: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Send each leader its block, and receive this leader's block from each."""
        works = []
        for other in range(len(self._homes)):
            if other == self._home:
                received[other].copy_(blocks[other])
            else:
                works.append(self.leaders.recv([received[other]], other, _TAG))
                works.append(self.leaders.send([blocks[other]], other, _TAG))
        for work in works:
            work.wait()

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The other ranks of this host wait for a message that will not come.
            if self.near is not None:
                self.near.abort(f"{_BETWEEN}: {error}")
                if isinstance(error, RuntimeError) and not str(error).startswith(_BETWEEN):
                    raise RuntimeError(self._named(str(error))) from error
            raise

    def _named(self, text: str) -> str:
        """Replace the rank numbers in an error of ``near``, counted within this host, by the run's rank numbers."""
        known = {str(place): rank for place, rank in enumerate(self._homes[self._home])}
        return re.sub(r"\brank (\d+)\b", lambda found: f"rank {known.get(found[1], found[1])}", text)

    def abort(self) -> None:
        """Fail the exchanges under way on this host's ranks."""
        if self.near is not None:
            self.near.abort(f"rank {self._place} aborted its process group")

    def close(self) -> None:
        """Close the connections."""
        if self.near is not None:
            self.near.close()


def hosts(
    rank: int,
    all_gather: Callable[[bytes], list[bytes]],
    among: Callable[[str, int, int], Any],
    timeout_s: float,
    number: int = 1,
    key: bytes = b"",
) -> list[HostExchanges] | str:
    """Return ``number`` exchanges over the hosts, or on all ranks the reason why there are none; a collective.

    Args:
        all_gather: an exchange of all ranks that works already.
        among: makes a process group from a name, a rank and a world size.
        timeout_s: how long an exchange will wait for a rank.
        key: secret of the run's ranks.

    Raises:
        OSError: when a rank is gone meanwhile.
        RuntimeError: when the hosts do not connect.
    """
    found = shared_by_host(rank, all_gather, timeout_s, number, key)
    if isinstance(found, str):
        return found
    homes, near = found
    if not 1 < len(homes) < sum(map(len, homes)):
        return "each rank is on a host of its own"
    first = next((i for i, home in enumerate(homes) if home[0] == rank), None)
    leaders = [among(f"hosts/{i}", first, len(homes)) if first is not None else None for i in range(number)]
    return [HostExchanges(near[i] if near else None, leaders[i], homes, rank) for i in range(number)]


# Note [Several hosts]
#
# Between hosts each number travels once in each direction, however many ranks a host has. The ranks of a host sum their
# numbers in shared memory, the first of them sums with the first ranks of other hosts over gloo, and the result is
# written back to the memory. Large tensors go in pieces, so that one piece is between hosts while the next is summed
# within. All ranks end with the same bits: those of a host copy their first rank's, and gloo gives the same to all that
# it serves.
