"""``Group``: the exchanges between the ranks of a run, over process groups that the program never sees."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lagom.collectives.background import BackgroundExchanges, Done
from lagom.collectives.connect import connect_mesh
from lagom.collectives.mesh_group import MeshGroup
from lagom.collectives.messages import as_bytes, as_tensor
from lagom.collectives.native import OPERATIONS, TYPES
from lagom.collectives.operation import ASIDE, Operation
from lagom.collectives.prepared_averages import PreparedAverages
from lagom.collectives.transports import KEPT, Transports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from lagom.collectives.background import Work
    from lagom.collectives.mesh import Mesh
    from lagom.collectives.native import Communicator
    from lagom.monitor.spans import Spans

TIMEOUT_S = 30 * 60.0
"""Seconds that a rank waits for another; torch's own default for gloo."""
_FIRST = 4096 - 8
"""Bytes that travel together with their length, so that a short message takes one exchange."""
_SUM = OPERATIONS["sum"]


class Group(PreparedAverages):
    """All ranks of a run, in order.

    The process groups are made directly, never registered as torch's default one, so that
    ``torch.distributed.is_initialized()`` stays False for the program. Every call is a collective: all ranks make the
    same calls in the same order.

    Args:
        all_gather: an exchange of texts that works already; the ranks find each other with it.
        gloo: makes a process group from a name, a rank and a world size. It is called when one is needed: for tensors
            that
            shared memory does not serve, and between hosts.
        nccl: serves CUDA tensors; None if ranks have no GPU, or share one.
        key: secret of the run's ranks.
        ip: address at which ranks on other hosts reach this one.
        shares_memory: send CPU tensors through shared memory when the ranks are on one host. See Note [Shared memory].

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
        """Return the nanoseconds that this rank has waited for each other rank in exchanges of messages.

        Any thread may call this at any time.
        """
        if self._ways.near:
            return self._ways.near.waited()
        return list(self._mesh.waited) if self._mesh is not None else []

    def standing(self) -> tuple[str, int, list[int]]:
        """Return the exchange in which this rank waits, its number, and the ranks that have not come.

        The text is empty when this rank does not wait, or waits in an exchange of gloo or NCCL. Any thread may call
        this at any time.
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
        """Whether CPU tensors are exchanged through shared memory; unknown before the first exchange."""
        return bool(self._ways.near)

    @property
    def has_memory(self) -> bool:
        """Whether any ranks share memory that carries sums; unknown before the first exchange, equal on all ranks."""
        return self.shares_memory or self._ways.hosts is not None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous ``tensor`` over the ranks, in place."""
        self.wait(self.all_reduce_later(tensor))

    def all_reduce_later(self, tensor: torch.Tensor) -> Work:
        """Begin to sum a contiguous ``tensor`` over the ranks, in place."""
        assert tensor.is_contiguous()
        with Operation("all_reduce", self.spans, tensor.nbytes) as operation:
            near = self._ways.connected() if tensor.device.type == "cpu" and tensor.dtype in TYPES else None
            if near:
                near.all_reduce(tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], _SUM)
                return Done()
            if self._ways.hosts is not None and near is not None:
                self._ways.hosts.all_reduce(tensor)
                return Done()
            return operation.goes_on(self._serving(tensor).allreduce([tensor]))

    def open_aside(self) -> None:
        """Connect for ``all_reduce_aside`` on the first call, which is a collective."""
        with Operation("connecting"):
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
        """Begin to sum a CPU tensor as ``all_reduce_later`` does, in an order independent of the other exchanges."""
        assert tensor.is_contiguous()
        if self._thread is not None and self._ways.near_aside is not None:
            return self._thread.later(partial(_sum, self._ways.near_aside, tensor, self.spans))
        with Operation("all_reduce", self.spans, tensor.nbytes, ASIDE) as operation:
            if self._thread is not None and self._ways.hosts_aside is not None:
                return operation.goes_on(self._thread.later(partial(self._ways.hosts_aside.all_reduce, tensor)))
            if self._thread is not None and self._aside is not None:
                return operation.goes_on(self._thread.later(partial(_sum_by_messages, self._aside, tensor)))
            return operation.goes_on(self._group_of("aside").allreduce([tensor]))

    @property
    def reduces_parts(self) -> bool:
        """Whether ``reduce_parts_aside`` is available; unknown before the first exchange, equal on all ranks."""
        return self._ways.near_aside is not None

    def reduce_parts_aside(self, whole: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> Work:
        """Begin an ``all_reduce_aside`` of which each rank needs only some sums; the bits are the same.

        Args:
            whole: this rank's numbers.
            counts: how many numbers each rank receives, one rank's behind the other's.
            out: receives this rank's sums; or ``whole`` itself, which then receives them in its own part.
        """
        assert self._thread is not None
        assert self._ways.near_aside is not None
        return self._thread.later(partial(_sum_parts, self._ways.near_aside, whole, counts, out))

    def wait(self, work: Work) -> None:
        """Wait until ``work`` is done."""
        if type(work) is not Done:
            with Operation("all_reduce", self.spans, stream="", shown="wait"):
                work.wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite a contiguous ``tensor`` with the one of rank ``root``."""
        assert tensor.is_contiguous()
        with Operation("broadcast", self.spans, tensor.nbytes):
            near = self._ways.connected() if tensor.device.type == "cpu" else None
            if near:
                near.broadcast(tensor.data_ptr(), tensor.nbytes, root)
            elif self._ways.hosts is not None and near is not None:
                self._ways.hosts.broadcast(tensor, root)
            else:
                self._serving(tensor).broadcast(tensor, root).wait()

    def broadcast_later(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to overwrite a contiguous ``tensor`` with the one of rank ``root``."""
        with Operation("broadcast"):
            near = self._ways.connected() if tensor.device.type == "cpu" else None
            if near:
                near.broadcast(tensor.data_ptr(), tensor.nbytes, root)
                return Done()
            work: Work = self._serving(tensor).broadcast(tensor, root)
            return work

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        """Return the ``data`` of rank ``root``; the other ranks' data is ignored."""
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
        """Return the ``data`` of all ranks, in rank order; lengths may differ."""
        return [bytes(view) for view in self.exchange(data)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous ``tensor`` of every rank, in rank order; all have one shape."""
        assert tensor.is_contiguous()
        with Operation("all_gather", self.spans, tensor.nbytes):
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
        """Gather every rank's contiguous ``part``, equally many bytes, into a contiguous ``whole``, in rank order."""
        assert whole.numel() == part.numel() * self.world_size
        with Operation("all_gather", self.spans, whole.nbytes, shown="all_gather_into"):
            near = self._ways.connected() if part.device.type == "cpu" else None
            if near:
                near.all_gather(part.data_ptr(), whole.data_ptr(), part.nbytes)
            elif self._ways.hosts is not None and near is not None:
                self._ways.hosts.all_gather(whole, part)
            else:
                self._serving(part)._allgather_base(whole, part).wait()

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row i of the contiguous ``rows`` to rank i, and return the rows received, all of one shape."""
        assert rows.is_contiguous()
        assert len(rows) == self.world_size
        if rows.is_cuda and not self.has_gpus:  # gloo, which serves ranks that share a GPU, has this for the CPU only
            return self.all_to_all(rows.cpu()).to(rows.device)
        found = torch.empty_like(rows)
        with Operation("all_to_all", self.spans, rows.nbytes):
            near = self._ways.connected() if rows.device.type == "cpu" else None
            if near:
                sizes = [row.nbytes for row in rows]
                near.all_to_all(rows.data_ptr(), sizes, found.data_ptr(), sizes)
                return found
            out, given = (one.view(torch.uint8).view(self.world_size, -1) for one in (found, rows))
            self._serving(rows).alltoall_base(out, given, [], []).wait()
        return found

    def _exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        with Operation("exchange", self.spans, len(head) + (0 if body is None else len(body))):
            near = self._ways.connected()
            return near.exchange(head, body) if near else self._meshed().exchange(head, body)

    def _meshed(self) -> Mesh:
        if self._mesh is None:
            self._mesh = self._connected()
        return self._mesh

    def _connected(self) -> Mesh:
        with Operation("connecting"):
            return connect_mesh(self.rank, self.world_size, self._ip, self._first_gather, self._key, TIMEOUT_S)

    def _is_of_one_host(self) -> bool:
        """Return whether tensors may go through Unix sockets when memory does not carry them. See Note [Gloo]."""
        return self._may_share and self._ways.hosts is None and self._meshed().is_of_one_host

    def _with_room(self, size: int) -> Communicator | None:
        with Operation("exchange"):
            near = self._ways.connected()
        return near if near and size <= near.room() // 2 else None

    def close(self) -> None:
        """Close the connections to the other ranks, which may still read what they have received."""
        if self._mesh is not None:
            self._mesh.close()
        if self._thread is not None:
            self._thread.close()
        self._ways.close()

    def barrier(self) -> None:
        """Wait for all ranks."""
        with Operation("barrier", self.spans):
            near = self._ways.connected()
            if near:
                near.barrier()
            else:
                self.exchange(b"")

    def connect(self) -> None:
        """Connect with all ranks, if no exchange has yet, to notice from now on when a rank ends; a collective."""
        self.exchange(b"")

    def _serving(self, tensor: torch.Tensor) -> Any:  # a process group, or an object with its methods
        if self._nccl is not None and tensor.device.type != "cpu":
            return self._nccl
        if tensor.device.type == "cpu" and self._is_of_one_host():
            return MeshGroup(self._meshed(), self.rank, self.world_size)
        return self._group_of("gloo")

    def _group_of(self, name: str) -> dist.ProcessGroup:
        """Return the gloo group of this name; all ranks make it when it is first needed. See Note [Gloo]."""
        if name not in self._groups:
            with Operation("connecting"):
                self._groups[name] = self._gloo(name, self.rank, self.world_size)
            KEPT.append(self._groups[name])
        return self._groups[name]


def _sum(near: Communicator, tensor: torch.Tensor, spans: Spans | None) -> None:
    with Operation("all_reduce", spans, tensor.nbytes, ASIDE):
        near.all_reduce(tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], _SUM)


def _sum_by_messages(mesh: MeshGroup, tensor: torch.Tensor) -> None:
    mesh.allreduce([tensor])


def _sum_parts(near: Communicator, whole: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
    near.reduce_parts(whole.data_ptr(), counts, out.data_ptr(), TYPES[whole.dtype], _SUM)


# Note [Gloo]
#
# gloo listens at a port for as long as it lives, accepts every connection without proof, and adds up whatever arrives.
# So a gloo group is made only for tensors that nothing else serves. Between hosts that is nearly everything large. On
# one host there are two cases: the program asks for gloo (collectives="gloo"), and CUDA tensors of ranks that share a
# GPU. Tensors that shared memory does not carry go through Unix sockets: types that csrc/arithmetic.hpp does not have,
# or all tensors if lagom was installed without its compiled part.
