"""``Group``: the exchanges between the ranks of a run, over a process group that the program never sees."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lagom.collectives.background import BackgroundExchanges, Done
from lagom.collectives.connect import connect_mesh
from lagom.collectives.mesh_group import MeshGroup
from lagom.collectives.messages import as_bytes, as_tensor
from lagom.collectives.native import OPERATIONS, TYPES
from lagom.collectives.prepared_averages import PreparedAverages
from lagom.collectives.requests import naming
from lagom.collectives.transports import KEPT, Transports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from lagom.collectives.background import Work
    from lagom.collectives.mesh import Mesh
    from lagom.collectives.native import Communicator

TIMEOUT_S = 30 * 60.0
"""How long a rank waits for another; torch's own default for gloo."""
_FIRST = 4096 - 8
"""Bytes that travel along with their own length, so that a short message takes one exchange."""
_SUM = OPERATIONS["sum"]


class Group(PreparedAverages):
    """All ranks of a run, in order.

    The process groups are made directly, never registered as torch's default one, so that
    ``torch.distributed.is_initialized()`` stays False to the program. Every call is a collective: all
    ranks make the same calls in the same order.

    Args:
        all_gather: an exchange of texts that works already, by which ranks find each other.
        gloo: makes a process group of a name for a rank of so many, when there is need of one: what shared memory
            does not serve, and ranks of several hosts.
        nccl: serves CUDA tensors; None where ranks have no GPU, or share one.
        key: what the ranks of this run know and nobody else does.
        ip: where ranks on other hosts reach this one.
        shares_memory: CPU tensors go through shared memory where ranks are on one host. See Note [Shared memory].

    Raises:
        CollectiveError: from every method, when the exchange fails.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        all_gather: Callable[[bytes], list[bytes]],
        gloo: Callable[[str, int, int], dist.ProcessGroup],
        *,
        nccl: dist.ProcessGroup | None = None,
        key: bytes = b"",
        ip: str = "127.0.0.1",
        shares_memory: bool = True,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self._gloo = gloo
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._nccl = nccl
        self._key = key
        self._ip = ip
        self._mesh: Mesh | None = None
        self._aside: MeshGroup | None = None
        self._may_share = shares_memory
        self._first_gather = all_gather
        self._ways = Transports(
            rank, all_gather, gloo, TIMEOUT_S, key=key, shares_memory=shares_memory, tells=not self.has_gpus
        )
        self._thread: BackgroundExchanges | None = None

    def waited(self) -> list[int]:
        """Nanoseconds for which this rank has waited for each other in exchanges of messages; may be asked anywhere."""
        if self._ways.near:
            return self._ways.near.waited()
        return list(self._mesh.waited) if self._mesh is not None else []

    def standing(self) -> tuple[str, int, list[int]]:
        """The exchange in which this rank waits, its number, and the ranks that have not come; may be asked anywhere.

        No words where it does not wait, or in one that is gloo's or NCCL's own.
        """
        if self._ways.near:
            return self._ways.near.standing()
        return self._mesh.standing() if self._mesh is not None else ("", 0, [])

    @property
    def has_gpus(self) -> bool:
        """Whether every rank has a GPU to itself."""
        return self._nccl is not None

    @property
    def shares_memory(self) -> bool:
        """Whether what is on the CPU is exchanged through memory; not before the first exchange."""
        return bool(self._ways.near)

    @property
    def has_memory(self) -> bool:
        """Whether any ranks share memory that sums go through; not before the first exchange, and alike on all."""
        return self.shares_memory or self._ways.hosts is not None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous ``tensor`` over the ranks, in place."""
        self.wait(self.all_reduce_later(tensor))

    def all_reduce_later(self, tensor: torch.Tensor) -> Work:
        """Begin to sum a contiguous ``tensor`` over the ranks, in place."""
        assert tensor.is_contiguous()
        with naming("all_reduce"):
            near = self._ways.connected() if tensor.device.type == "cpu" and tensor.dtype in TYPES else None
            if near:
                near.all_reduce(tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], _SUM)
                return Done()
            if self._ways.hosts is not None and near is not None:
                self._ways.hosts.all_reduce(tensor)
                return Done()
            work: Work = self._serving(tensor).allreduce([tensor])
            return work

    def open_aside(self) -> None:
        """Connect for ``all_reduce_aside``, the first time; a collective then."""
        with naming("connecting"):
            near = self._ways.connected()
        if not near and self._ways.hosts_aside is None:
            if not self._is_of_one_host():
                self._group_of("aside")
                return
            if self._aside is None:
                self._aside = MeshGroup(self._connected(), self.rank, self.world_size)
        if self._thread is None:
            self._thread = BackgroundExchanges("lagom-all-reduce")

    def all_reduce_aside(self, tensor: torch.Tensor) -> Work:
        """As ``all_reduce_later``, of CPU tensors, in an order of its own: other exchanges may come before or after."""
        assert tensor.is_contiguous()
        if self._thread is not None and self._ways.near_aside is not None:
            return self._thread.later(partial(_sum, self._ways.near_aside, tensor))
        if self._thread is not None and self._ways.hosts_aside is not None:
            return self._thread.later(partial(self._ways.hosts_aside.all_reduce, tensor))
        if self._thread is not None and self._aside is not None:
            return self._thread.later(partial(_sum_by_messages, self._aside, tensor))
        with naming("all_reduce"):
            return self._group_of("aside").allreduce([tensor])

    @property
    def reduces_parts(self) -> bool:
        """Whether there is ``reduce_parts_aside``; not before the first exchange, and then alike on all ranks."""
        return self._ways.near_aside is not None

    def reduce_parts_aside(self, whole: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> Work:
        """As ``all_reduce_aside``, where each rank needs some of the sums only, in the same bits.

        Args:
            whole: what this rank gives.
            counts: so many numbers for each rank, one behind the other.
            out: gets this rank's; or ``whole``, where all are.
        """
        assert self._thread is not None
        assert self._ways.near_aside is not None
        return self._thread.later(partial(_sum_parts, self._ways.near_aside, whole, counts, out))

    def wait(self, work: Work) -> None:
        """Until ``work`` is done."""
        with naming("all_reduce"):
            work.wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite a contiguous ``tensor`` with the one of rank ``root``."""
        assert tensor.is_contiguous()
        with naming("broadcast"):
            near = self._ways.connected() if tensor.device.type == "cpu" else None
            if near:
                near.broadcast(tensor.data_ptr(), tensor.nbytes, root)
            elif self._ways.hosts is not None and near is not None:
                self._ways.hosts.broadcast(tensor, root)
            else:
                self._serving(tensor).broadcast(tensor, root).wait()

    def broadcast_later(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to overwrite a contiguous ``tensor`` with the one of rank ``root``."""
        with naming("broadcast"):
            near = self._ways.connected() if tensor.device.type == "cpu" else None
            if near:
                near.broadcast(tensor.data_ptr(), tensor.nbytes, root)
                return Done()
            work: Work = self._serving(tensor).broadcast(tensor, root)
            return work

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        """The ``data`` of rank ``root``; what the others give is ignored."""
        frame = torch.zeros(8 + _FIRST, dtype=torch.uint8)
        if self.rank == root:
            frame[:8] = as_tensor(len(data).to_bytes(8, "little"))
            frame[8 : 8 + min(len(data), _FIRST)] = as_tensor(data[:_FIRST])
        self.broadcast(frame, root)
        length = int.from_bytes(as_bytes(frame[:8]), "little")
        head = as_bytes(frame[8 : 8 + min(length, _FIRST)])
        if length <= _FIRST:
            return head
        rest = as_tensor(data[_FIRST:]) if self.rank == root else torch.empty(length - _FIRST, dtype=torch.uint8)
        self.broadcast(rest, root)
        return head + as_bytes(rest)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The ``data`` of all ranks, in rank order; lengths may differ."""
        return [bytes(view) for view in self.exchange(data)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The contiguous ``tensor`` of every rank, in rank order; all of one shape."""
        assert tensor.is_contiguous()
        with naming("all_gather"):
            near = self._ways.connected() if tensor.device.type == "cpu" else None
            if near:
                found = tensor.new_empty((self.world_size, *tensor.shape))
                near.all_gather(tensor.data_ptr(), found.data_ptr(), tensor.nbytes)
                return list(found.unbind())
            if self._ways.hosts is not None and near is not None:
                found = tensor.new_empty((self.world_size, *tensor.shape))
                self._ways.hosts.all_gather(found, tensor)
                return list(found.unbind())
            theirs = [torch.empty_like(tensor) for _ in range(self.world_size)]
            self._serving(tensor).allgather([theirs], [tensor]).wait()
        return theirs

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """The contiguous ``part`` of every rank, in rank order, in a contiguous ``whole``; bytes, all as many."""
        assert whole.numel() == part.numel() * self.world_size
        with naming("all_gather"):
            near = self._ways.connected() if part.device.type == "cpu" else None
            if near:
                near.all_gather(part.data_ptr(), whole.data_ptr(), part.nbytes)
            elif self._ways.hosts is not None and near is not None:
                self._ways.hosts.all_gather(whole, part)
            else:
                self._serving(part)._allgather_base(whole, part).wait()

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Of a contiguous ``rows``, one for each rank, the row of this rank from each of them; all of one shape."""
        assert rows.is_contiguous()
        assert len(rows) == self.world_size
        if rows.is_cuda and not self.has_gpus:  # gloo, which serves ranks that share a GPU, has this for the CPU alone
            return self.all_to_all(rows.cpu()).to(rows.device)
        found = torch.empty_like(rows)
        with naming("all_to_all"):
            near = self._ways.connected() if rows.device.type == "cpu" else None
            if near:
                sizes = [row.nbytes for row in rows]
                near.all_to_all(rows.data_ptr(), sizes, found.data_ptr(), sizes)
                return found
            out, given = (one.view(torch.uint8).view(self.world_size, -1) for one in (found, rows))
            self._serving(rows).alltoall_base(out, given, [], []).wait()
        return found

    def _exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        with naming("exchange"):
            near = self._ways.connected()
            if near:
                return near.exchange(head, body)
        mesh = self._meshed()
        with naming("exchange"):
            return mesh.exchange(head, body)

    def _meshed(self) -> Mesh:
        if self._mesh is None:
            self._mesh = self._connected()
        return self._mesh

    def _connected(self) -> Mesh:
        with naming("connecting"):
            return connect_mesh(self.rank, self.world_size, self._ip, self._first_gather, self._key, TIMEOUT_S)

    def _is_of_one_host(self) -> bool:
        """Whether tensors may go through Unix sockets where memory does not carry them. See Note [Gloo]."""
        return self._may_share and self._ways.hosts is None and self._meshed().is_of_one_host

    def _with_room(self, size: int) -> Communicator | None:
        with naming("exchange"):
            near = self._ways.connected()
        return near if near and size <= near.room() // 2 else None

    def close(self) -> None:
        """Hang up on the other ranks, who may still be busy with what they have got."""
        if self._mesh is not None:
            self._mesh.close()
        if self._thread is not None:
            self._thread.close()
        self._ways.close()

    def barrier(self) -> None:
        """Wait for all ranks."""
        with naming("barrier"):
            near = self._ways.connected()
            if near:
                near.barrier()
                return
        self.exchange(b"")

    def connect(self) -> None:
        """Connect with all ranks, if no exchange has: so one that ends is noticed from now on. A collective."""
        self.exchange(b"")

    def _serving(self, tensor: torch.Tensor) -> Any:  # a process group, or what has its methods
        if self._nccl is not None and tensor.device.type != "cpu":
            return self._nccl
        if tensor.device.type == "cpu" and self._is_of_one_host():
            return MeshGroup(self._meshed(), self.rank, self.world_size)
        return self._group_of("gloo")

    def _group_of(self, name: str) -> dist.ProcessGroup:
        """One of gloo's, made when it is first asked for, on all ranks. See Note [Gloo]."""
        if name not in self._groups:
            with naming("connecting"):
                self._groups[name] = self._gloo(name, self.rank, self.world_size)
            KEPT.append(self._groups[name])
        return self._groups[name]


def _sum(near: Communicator, tensor: torch.Tensor) -> None:
    near.all_reduce(tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], _SUM)


def _sum_by_messages(mesh: MeshGroup, tensor: torch.Tensor) -> None:
    mesh.allreduce([tensor])


def _sum_parts(near: Communicator, whole: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
    near.reduce_parts(whole.data_ptr(), counts, out.data_ptr(), TYPES[whole.dtype], _SUM)


# Note [Gloo]
#
# gloo listens at a port for as long as it lives, and lets in whoever comes: it asks for no proof, and what it is sent
# it adds up. So a group of gloo's is made only for what nothing else serves. Between hosts that is nearly everything
# large. On one host it is what is asked for (collectives="gloo"), and CUDA tensors of ranks that share a GPU. What
# shared memory does not carry (types that csrc/arithmetic.hpp does not have), or all where there is none (lagom was
# installed without its compiled part), goes through Unix sockets.
