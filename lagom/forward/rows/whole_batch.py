"""Whole batches on every rank: each rank computes a block of rows, and gets all outputs.

See Note [Whole] in row_functions.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import AgreedExchange, signature
from lagom.run_state.kept_memory import KeptMemory
from lagom.run_state.memory_layout import resolve_lazy
from lagom.watch.step_clock import EXCHANGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from lagom.exchange.group import Group


Orders: TypeAlias = "Sequence[tuple[int, ...] | None]"
"""For each tensor its dimensions in the order of memory; None if memory has them in order."""
ALWAYS = False
"""Slice every forward, whether it pays or not: for tests and benchmarks."""
_SPEED = {"cpu": 5e10, "accelerator": 2e13}
"""Rough number of operations per second of a busy rank."""


class SplitCost(NamedTuple):
    """Constants of the cost of splitting a forward, for one way of exchange."""

    overhead_s: float
    """Seconds of Python's work around the forward and its backward; none where an accelerator computes meanwhile."""
    latency_s: float
    """Seconds of the smallest exchange."""
    bandwidth: float
    """Bytes per second of an exchange."""


COSTS = {
    "memory": SplitCost(1e-3, 4e-4, 2e9),
    "cpu": SplitCost(1e-3, 1.5e-3, 5e8),
    "accelerator": SplitCost(0.0, 5e-5, 2e10),
}
"""Through shared memory, over sockets or gloo, and on accelerators."""
_MIN_UNPACKED = 2**18
"""Tensors of at least this many bytes each are not packed for an exchange if all ranks have equally many rows.

Packing would take longer than an exchange for each.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardWork:
    """The amount of work of a forward, and of what ranks exchange if they split it."""

    rows: int
    """Rows of the batch that the other numbers are for."""
    flops: float = 0.0
    """Floating-point operations."""
    output_bytes: float = 0.0
    input_bytes: float = 0.0
    """Bytes of inputs that get a gradient, which is gathered in the backward."""
    parameter_bytes: int = 0
    """Bytes of parameters that get a gradient: without a split every rank has the whole gradient, and averages none."""
    num_batchnorms: int = 0
    """Calls of BatchNorm that use the statistics of the batch."""

    def for_rows(self, rows: int) -> ForwardWork:
        """Return the work for another number of rows."""
        ratio = rows / self.rows
        return replace(
            self,
            rows=rows,
            flops=self.flops * ratio,
            output_bytes=self.output_bytes * ratio,
            input_bytes=self.input_bytes * ratio,
        )


def is_worth_slicing(
    work: ForwardWork, world_size: int, device: torch.device, *, training: bool, shares_memory: bool
) -> bool:
    """Return whether slicing a forward saves more time than its exchanges take.

    Constants decide, not measurements, since all ranks must decide equally, and each run like the one before.
    """
    if ALWAYS:
        return True
    kind = "cpu" if device.type == "cpu" else "accelerator"
    saved = work.flops * (3 if training else 1) * (1 - 1 / world_size) / _SPEED[kind]
    way = "memory" if shares_memory and kind == "cpu" else kind
    num_exchanges, num_bytes = 1 + work.num_batchnorms, work.output_bytes
    if training:
        num_exchanges += work.num_batchnorms + bool(work.input_bytes)
        # An average in place takes about half the time of a gather of as many bytes.
        num_bytes += work.input_bytes + 0.5 * work.parameter_bytes
    cost = COSTS[way]
    return saved > cost.overhead_s + num_exchanges * cost.latency_s + num_bytes / cost.bandwidth


@dataclass(frozen=True)
class RowBlock:
    """One rank's rows of a batch: consecutive. The numbers of rows of two ranks differ by at most one."""

    rank: int
    world_size: int
    num_all: int
    """Rows of the batch."""

    @cached_property
    def start(self) -> int:
        """Index of the first row."""
        return self.num_all * self.rank // self.world_size

    @cached_property
    def num_mine(self) -> int:
        """Number of rows."""
        return self.num_all * (self.rank + 1) // self.world_size - self.start

    @property
    def even(self) -> bool:
        """Return whether all ranks have the same number of rows."""
        return self.num_all % self.world_size == 0

    @cached_property
    def all_blocks(self) -> tuple[RowBlock, ...]:
        """Blocks of all ranks, with this one, in rank order."""
        return tuple(row_block(rank, self.world_size, self.num_all) for rank in range(self.world_size))

    def of(self, tensor: Tensor, factor: int = 1) -> Tensor:
        """Return a view of this rank's rows of a tensor that has ``factor`` rows for each row of the batch."""
        return tensor.narrow(0, factor * self.start, factor * self.num_mine)


@lru_cache(maxsize=1024)
def row_block(rank: int, world_size: int, num_all: int) -> RowBlock:
    """Return a block of rows; the same object for the same numbers, so that its properties are computed once."""
    return RowBlock(rank, world_size, num_all)


class UnequalInputError(DivergenceError):
    """Ranks gather results of different inputs."""


class Gatherer:
    """Exchanges blocks of rows for whole tensors.

    Args:
        meet: called with a place if ranks gather different things; raises an error unless all ranks are at that place.
    """

    def __init__(self, group: Group, meet: Callable[[str], None]) -> None:
        self._group = group
        self.clock = group.clock
        """Clock of the rank's training steps."""
        self._meet = meet
        self._frame = AgreedExchange(group)
        self._memory = KeptMemory()

    def gather(
        self,
        tensors: Sequence[Tensor],
        factors: Sequence[int],
        block: RowBlock,
        place: str,
        signed: bytes = b"",
        orders: Orders = (),
    ) -> list[Tensor]:
        """Gather whole tensors from the blocks of rows that each rank passes as ``tensors``; a collective.

        Args:
            factors: for each tensor, its rows per row of the batch.
            place: description of this exchange for an error.
            signed: bytes that must be equal on all ranks.
            orders: for each result, its dimensions in the order of memory, equal on all ranks; empty: all in order.

        Raises:
            DivergenceError: on all ranks, when they gather different things on the CPU; on GPUs this is not checked.
        """
        shapes = [(f * block.num_all, *t.shape[1:]) for t, f in zip(tensors, factors, strict=True)]
        wholes = [
            self._memory.empty(shape, t.dtype) if t.is_cpu else t.new_empty(shape)
            for t, shape in zip(tensors, shapes, strict=True)
        ]
        with self.clock.during(EXCHANGE):
            self._fill(tensors, wholes, factors, block, place, signed)
        return [
            whole
            if order is None
            else torch.empty_permuted(whole.shape, order, dtype=whole.dtype, device=whole.device).copy_(whole)
            for whole, order in zip(wholes, orders or [None] * len(wholes), strict=True)
        ]

    def _fill(
        self,
        tensors: Sequence[Tensor],
        wholes: Sequence[Tensor],
        factors: Sequence[int],
        block: RowBlock,
        place: str,
        signed: bytes,
    ) -> None:
        """Fill ``wholes`` with the blocks of all ranks; a collective."""
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for device, indices in by_device.items():
            mine = [tensors[i].detach() for i in indices]
            into = [[other.of(wholes[i], factors[i]) for i in indices] for other in block.all_blocks]
            if device.type != "cpu":
                # Without a signature, since reading it would wait for all work on the device.
                self._exchange_large(mine, [wholes[i] for i in indices], into)
                continue
            kinds = repr([(w.shape, w.dtype) for w in wholes])
            mark = signature(b"".join((place.encode(), kinds.encode(), signed)))
            sizes = [sum(map(_aligned_num_bytes, parts)) for parts in into]
            is_small = max(sizes) <= self._frame.room
            is_equal = self._exchange_small(mine, into, mark, block) if is_small else self._frame.exchange(mark)
            if not is_equal:
                self._meet(place)
                raise UnequalInputError(f"{place}: {_UNEQUAL}")
            if not is_small:
                self._exchange_large(mine, [wholes[i] for i in indices], into)

    def _exchange_small(self, mine: list[Tensor], into: list[list[Tensor]], mark: bytes, block: RowBlock) -> bool:
        """Exchange signatures together with small tensors; return whether all signatures are equal."""
        sizes = [sum(map(_aligned_num_bytes, parts)) for parts in into]
        sent = memoryview(bytearray(sizes[block.rank]))
        for room, tensor in zip(_views_of_bytes(sent, mine), mine, strict=True):
            if room is not tensor:  # a write to the program's own tensor would count as a change, even of no element
                room.copy_(tensor)
        rows = self._frame.gather(sent if len(sent) else None, mark)
        if rows is None:
            return False
        for row, parts in zip(rows, into, strict=True):
            for room, part in zip(mine if row is None else _views_of_bytes(row, parts), parts, strict=True):
                part.copy_(room)
        return True

    def _exchange_large(self, mine: list[Tensor], wholes: list[Tensor], into: list[list[Tensor]]) -> None:
        is_even = all(len(part) == len(parts[0]) for parts in zip(*into, strict=True) for part in parts)
        if is_even and min(tensor.nbytes for tensor in mine) >= _MIN_UNPACKED:
            for whole, tensor in zip(wholes, mine, strict=True):
                part = resolve_lazy(tensor).contiguous()
                self._group.all_gather_into(whole.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))
            return
        size = max(sum(map(_aligned_num_bytes, parts)) for parts in into)
        sent = torch.empty(size, dtype=torch.uint8, device=mine[0].device)
        for room, tensor in zip(_tensor_views(sent, mine), mine, strict=True):
            room.copy_(tensor)
        for got, parts in zip(self._group.all_gather(sent), into, strict=True):
            for room, part in zip(_tensor_views(got, parts), parts, strict=True):
                part.copy_(room)


_UNEQUAL = (
    "its input is not the same on all ranks, although every rank has whole batches; draw random numbers from torch's, "
    "numpy's or random's global generators, which lagom starts equal on all ranks, and not from the time, the process "
    "or a generator of your own without a fixed seed"
)


def _aligned_num_bytes(tensor: Tensor) -> int:
    return (
        -(-tensor.numel() * tensor.element_size() // 16) * 16
    )  # each starts at an offset that is aligned for any type


def _tensor_views(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of ``flat``, one for each of ``tensors``."""
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        yield flat[offset : offset + size].view(tensor.dtype).view(tensor.shape)
        offset += _aligned_num_bytes(tensor)


def _views_of_bytes(buffer: memoryview, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield tensors in ``buffer`` like each of ``tensors``; for a tensor without elements, itself."""
    offset = 0
    for tensor in tensors:
        count = tensor.numel()
        if count:
            flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=count, offset=offset)
            yield flat.view(tensor.shape)
        else:
            yield tensor
        offset += _aligned_num_bytes(tensor)


@dataclass(eq=False)
class RowExchange:
    """Gathers the outputs of one sliced forward, the gradients of its inputs, and the ranks' parts of a shared loss."""

    gatherer: Gatherer
    block: RowBlock
    place: str

    def gather(
        self, tensors: Sequence[Tensor], factors: Sequence[int], signed: bytes = b"", orders: Orders = ()
    ) -> list[Tensor]:
        """Gather whole tensors by ``Gatherer.gather``."""
        return self.gatherer.gather(tensors, factors, self.block, self.place, signed, orders)
