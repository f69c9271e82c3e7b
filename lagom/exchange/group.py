"""``Group``: the exchanges between the ranks of a run, over transports that the program never sees."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from lagom.exchange.background import ASIDE, BackgroundExchanges, CompletedWork, NamedExchange
from lagom.exchange.native import OPERATIONS, TYPES
from lagom.exchange.requests import RequestExchange
from lagom.exchange.sockets.encryption import NO_CREDENTIALS, Credentials
from lagom.exchange.transports import Transports

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch.distributed as dist

    from lagom.exchange.background import Work
    from lagom.exchange.native import Communicator
    from lagom.exchange.sockets.connect import GatherTexts
    from lagom.exchange.transport import Merging, Transport
    from lagom.watch.spans import Spans

TIMEOUT_S = 30 * 60.0
"""Seconds that a rank waits for another; torch's own default for gloo."""
_FIRST = 4096 - 8
"""Most bytes that ``broadcast_bytes`` sends together with their number, so that short data takes one broadcast."""


class Group(RequestExchange):
    """Exchanges tensors and bytes between all ranks of a run, by the transport that fits them.

    The process groups are made directly, never registered as torch's default one, so that
    ``torch.distributed.is_initialized()`` stays False for the program. Every exchange is a collective: all ranks make
    the same exchanges in the same order, except for ``ask`` (Note [Asking] in requests.py). Methods with "aside"
    in their names have an order of their own.

    Args:
        all_gather: gathers a text of every rank before the ranks are connected; they exchange their addresses with it.
        gloo: makes a process group from a name, a rank and a world size. It is called only when gloo is needed; see
            Note [Gloo] in transports.py.
        nccl: makes a process group for tensors on accelerators, such as NCCL's, from a name; None if ranks have no
            accelerator, share one, or have one without a backend.
        credentials: key and certificates that the run's ranks share.
        ip: address at which ranks on other hosts reach this one.
        shares_memory: whether CPU tensors may go through shared memory and lagom's own sockets; otherwise they go over
            gloo. See Note [Shared memory] in shared_memory.py.
        timeout_s: how long a rank waits for another.

    Raises:
        CollectiveError: from every method, when the exchange fails. A work that a method returned raises other errors;
            ``wait`` turns them into a CollectiveError.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        all_gather: GatherTexts,
        gloo: Callable[[str, int, int], dist.ProcessGroup],
        *,
        nccl: Callable[[str], dist.ProcessGroup] | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        ip: str = "127.0.0.1",
        shares_memory: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.ip = ip
        self.credentials = credentials
        self._transports = Transports(
            rank,
            world_size,
            all_gather,
            gloo,
            timeout_s,
            nccl=nccl,
            credentials=credentials,
            ip=ip,
            shares_memory=shares_memory,
        )
        self._aside: dict[str, Transport] = {}
        """Transports of ``all_reduce_aside``, by type of device; their exchanges are ordered among themselves alone."""
        self._thread: BackgroundExchanges | None = None

    def waited(self) -> list[int]:
        """Return the nanoseconds that this rank has waited for each other rank; empty before ranks are connected.

        Waits in exchanges of messages and in shared memory count, except those of ``all_reduce_aside``. Any thread may
        call this at any time.
        """
        messages = self._transports.connected_messages
        return messages.waited() if messages is not None else []

    def standing(self) -> tuple[str, int, list[int]]:
        """Return the exchange in which this rank waits, the exchange's number, and the ranks that have not joined it.

        The text is empty when this rank does not wait, or waits in an exchange of gloo or NCCL, of tensors between
        hosts, or of ``all_reduce_aside``. Any thread may call this at any time.
        """
        messages = self._transports.connected_messages
        return messages.standing() if messages is not None else ("", 0, [])

    @property
    def has_gpus(self) -> bool:
        """Whether every rank has an accelerator to itself, and a backend carries its tensors."""
        return self._transports.has_gpus

    @property
    def device_group_class(self) -> str | None:
        """Name of the class of the process group for tensors on accelerators; None without."""
        return self._transports.device_group_class

    @property
    def shares_memory(self) -> bool:
        """Whether CPU tensors go through memory that all ranks share; False before the first exchange."""
        return self._transports.memory is not None

    @property
    def sums_itself(self) -> bool:
        """Whether shared memory or ``HostTransport`` sums CPU tensors; False before the first exchange.

        Equal on all ranks.
        """
        return self._transports.has_fast

    @property
    def most_messages(self) -> int | None:
        """Most messages that any rank sends or reads in one ``merge`` over several hosts; None on one host.

        A collective if ranks are not connected yet; equal on all ranks.
        """
        with NamedExchange("connecting", clock=self.clock):
            messages = self._transports.host_messages()
        return messages.most_messages if messages is not None else None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous ``tensor`` over the ranks, in place."""
        self.wait(self.all_reduce_later(tensor))

    def all_reduce_later(self, tensor: torch.Tensor) -> Work:
        """Begin to sum a contiguous ``tensor`` over the ranks, in place."""
        assert tensor.is_contiguous()
        with NamedExchange("all_reduce", self.spans, tensor.nbytes, clock=self.clock) as operation:
            return operation.goes_on(self._transports.choose("all_reduce", tensor, "sum").all_reduce(tensor))

    def open_aside(self, devices: Collection[torch.device] = (torch.device("cpu"),)) -> None:
        """Connect for ``all_reduce_aside`` of tensors on ``devices``; a collective unless all are connected already."""
        for device in sorted(devices, key=str):
            if device.type not in self._aside:
                with NamedExchange("connecting", clock=self.clock):
                    self._aside[device.type] = aside = self._transports.connect_aside(device)
                if not aside.is_asynchronous:
                    self._thread = BackgroundExchanges("lagom-all-reduce")

    def all_reduce_aside(self, tensor: torch.Tensor) -> Work:
        """Begin to sum ``tensor`` as ``all_reduce_later`` does, in an order independent of the other exchanges.

        Call ``open_aside`` before.
        """
        assert tensor.is_contiguous()
        aside = self._aside[tensor.device.type]
        if not aside.is_asynchronous and self._thread is not None:
            return self._thread.later(partial(_sum, aside, tensor, self.spans))
        with NamedExchange("all_reduce", self.spans, tensor.nbytes, ASIDE, clock=self.clock) as operation:
            return operation.goes_on(aside.all_reduce(tensor))

    @property
    def reduces_parts(self) -> bool:
        """Whether ``reduce_parts_aside`` is available; False before the first exchange, equal on all ranks."""
        return self.shares_memory

    def reduce_parts_aside(self, whole: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> Work:
        """Begin a reduce-scatter of ``whole``, in one order with the calls of ``all_reduce_aside``.

        The sums have the same bits as those of ``all_reduce_aside``. Call ``open_aside`` for the CPU before.

        Args:
            whole: this rank's numbers: the parts for all ranks, in rank order.
            counts: number of elements of each rank's part.
            out: receives the sums of this rank's part. It may be ``whole`` if this rank's part is all of ``whole``.
        """
        memory = self._aside["cpu"].memory
        assert self._thread is not None
        assert memory is not None
        return self._thread.later(partial(_sum_parts, memory, whole, counts, out))

    def wait(self, work: Work) -> None:
        """Wait until ``work`` is done."""
        if type(work) is not CompletedWork:
            with NamedExchange("all_reduce", self.spans, stream="", shown="wait", clock=self.clock):
                work.wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite a contiguous ``tensor`` with the tensor of rank ``root``."""
        assert tensor.is_contiguous()
        with NamedExchange("broadcast", self.spans, tensor.nbytes, clock=self.clock):
            self._transports.choose("broadcast", tensor).broadcast(tensor, root).wait()

    def broadcast_later(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to overwrite a contiguous ``tensor`` with the tensor of rank ``root``."""
        with NamedExchange("broadcast", clock=self.clock):
            return self._transports.choose("broadcast", tensor).broadcast(tensor, root)

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        """Return the ``data`` of rank ``root``; the other ranks' data is ignored."""
        frame = torch.zeros(8 + _FIRST, dtype=torch.uint8, device="cpu")
        if self.rank == root:
            frame[:8] = _as_tensor(len(data).to_bytes(8, "little"))
            frame[8 : 8 + min(len(data), _FIRST)] = _as_tensor(data[:_FIRST])
        self.broadcast(frame, root)
        length = int.from_bytes(_as_bytes(frame[:8]), "little")
        head = _as_bytes(frame[8 : 8 + min(length, _FIRST)])
        if length <= _FIRST:
            return head
        is_root = self.rank == root
        rest = _as_tensor(data[_FIRST:]) if is_root else torch.empty(length - _FIRST, dtype=torch.uint8, device="cpu")
        self.broadcast(rest, root)
        return head + _as_bytes(rest)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all ranks, in rank order; lengths may differ."""
        return [bytes(view) for view in self.exchange(data)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous ``tensor`` of every rank, in rank order; all have one shape."""
        assert tensor.is_contiguous()
        whole = tensor.new_empty((self.world_size, *tensor.shape))
        with NamedExchange("all_gather", self.spans, tensor.nbytes, clock=self.clock):
            self._transports.choose("all_gather", tensor).all_gather(whole, tensor).wait()
        return list(whole.unbind())

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Concatenate the contiguous parts of all ranks, of equal size, in rank order into a contiguous ``whole``."""
        assert whole.numel() == part.numel() * self.world_size
        with NamedExchange("all_gather", self.spans, whole.nbytes, shown="all_gather_into", clock=self.clock):
            self._transports.choose("all_gather", part).all_gather(whole, part).wait()

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row i of the contiguous ``rows`` to rank i, and return the rows received, all of one shape."""
        assert rows.is_contiguous()
        assert len(rows) == self.world_size
        found = torch.empty_like(rows)
        with NamedExchange("all_to_all", self.spans, rows.nbytes, clock=self.clock):
            self._transports.choose("all_to_all_rows", rows).all_to_all_rows(found, rows).wait()
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        with NamedExchange("barrier", self.spans, clock=self.clock):
            self._transports.connect()
            if self._transports.memory is not None:
                self._transports.memory.barrier()
            else:
                self.exchange(b"")

    def connect(self) -> None:
        """Exchange an empty message, which connects the ranks: from then on they notice when one ends; a collective."""
        self.exchange(b"")

    def close(self) -> None:
        """Close the connections to the other ranks, except those of gloo and NCCL.

        Other ranks may still read the messages that they have received.
        """
        if self._thread is not None:
            self._thread.close()
        self._transports.close()

    def _exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        with NamedExchange("exchange", self.spans, len(head) + (0 if body is None else len(body)), clock=self.clock):
            return self._transports.messages().exchange(head, body)

    def _merge(self, head: bytes, body: memoryview, merging: Merging) -> list[memoryview] | memoryview:
        if (messages := self._transports.host_messages()) is not None:
            with NamedExchange("exchange", self.spans, len(head) + len(body), clock=self.clock):
                return messages.merge(head, body, merging)
        rows = self._exchange(head, body)
        if any(row[: len(head)] != head for row in rows):
            return rows
        return merging.of_ranks([body if rank == self.rank else row[len(head) :] for rank, row in enumerate(rows)])

    def _with_room(self, size: int) -> Communicator | None:
        with NamedExchange("exchange", clock=self.clock):
            self._transports.connect()
        memory = self._transports.memory
        return memory if memory is not None and size <= memory.room() - _MOST_SIGNED else None


_MOST_SIGNED = 1 << 12
"""Bytes of a slot that are kept for what precedes the sections of an average."""


def _sum(transport: Transport, tensor: torch.Tensor, spans: Spans | None) -> None:
    with NamedExchange("all_reduce", spans, tensor.nbytes, ASIDE):
        transport.all_reduce(tensor)


def _sum_parts(memory: Communicator, whole: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
    memory.reduce_parts(whole.data_ptr(), counts, out.data_ptr(), TYPES[whole.dtype], OPERATIONS["sum"])


def _as_tensor(data: bytes) -> torch.Tensor:
    """Return a copy of ``data`` as a tensor of uint8."""
    # The program may have set another default device.
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the content of a CPU ``tensor`` of uint8."""
    return bytes(tensor.numpy().data)
