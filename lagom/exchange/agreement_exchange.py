"""``AgreedExchange``: an exchange whose data is used only if all ranks have sent the same signature.

``PackedTensors`` packs small gradients into its message.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from lagom.exchange.transport import Merging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.exchange.group import Group

SIZE = 32
"""Bytes of a signature; a multiple of 16, so that elements of any type may follow."""
FRAME = 1 << 17
"""Most bytes that a rank sends along with its signature, summed over the receivers; more take a separate exchange."""
_FRAME_IN_MEMORY = 3 << 17
"""The same for an average through shared memory: 330 KB take 97 us there, and 148 us with a separate exchange."""


class AgreedExchange:
    """Exchanges signatures, and small tensors in the same message, which are used only if all signatures are equal.

    See Note [Which gradients] in gradients/gradient_averager.py.

    Args:
        size: most bytes of tensors that a rank sends along with its signature, summed over the other ranks that receive
            them; 0 when the tensors are on GPUs.
    """

    def __init__(self, group: Group, size: int = FRAME) -> None:
        self.room = size // max(group.world_size - 1, 1)
        """Most bytes of tensors that may follow the signature in the message to each other rank."""
        self._size = size
        self._group = group

    @cached_property
    def room_to_merge(self) -> int:
        """Most bytes that may follow the signature if they are merged on the way; the first access is a collective."""
        most = self._group.most_messages if self._size else None
        if most is not None:
            return self._size // most
        is_near = self._size == FRAME and self._group.shares_memory
        return _FRAME_IN_MEMORY // max(self._group.world_size - 1, 1) if is_near else self.room

    def exchange(self, signed: bytes) -> bool:
        """Return whether all ranks gave the same signature."""
        return all(row == signed for row in self._group.exchange(signed))

    def gather(self, body: memoryview | None, signed: bytes) -> list[memoryview | None] | None:
        """Return the bodies of all ranks, in rank order, if all gave the same signature; else None.

        The views are valid until the next exchange of the group. This rank's own entry is None.
        """
        rows = self._group.exchange(signed, body)
        if any(row[:SIZE] != signed for row in rows):
            return None
        return [None if i == self._group.rank else row[SIZE:] for i, row in enumerate(rows)]

    def average(
        self, parcel: PackedTensors, tensors: list[torch.Tensor], signed: bytes, *, are_plain: bool = False
    ) -> bool:
        """Average ``tensors`` in place if all ranks gave the same signature; return whether they did.

        Args:
            parcel: packed memory for tensors of these types and shapes.
            are_plain: whether ``is_plain_cpu_tensor`` is known to be true for all ``tensors``.
        """
        if parcel.averaging is None:
            parcel.averaging = parcel.prepare(self._group)
        if parcel.averaging and parcel.keeps_types and (are_plain or all(map(is_plain_cpu_tensor, tensors))):
            addresses = [one.data_ptr() for one in tensors]
            return parcel.averaging(signed, addresses, addresses)
        if tensors:
            torch._foreach_copy_(parcel.mine, tensors)
        if parcel.averaging:
            agreed = parcel.averaging(signed, *parcel.addresses)
        elif not parcel.packed:  # no tensors, or only empty ones
            agreed = self.exchange(signed)
        else:
            merged = self._group.merge(signed, parcel.packed, parcel.merging)
            agreed = merged is not None
            if merged is not None:
                parcel.average(merged, self._group.world_size)
        if agreed and tensors:
            torch._foreach_copy_(tensors, parcel.averages)
        return agreed

    def sum(self, numbers: torch.Tensor, signed: bytes) -> bool:
        """Sum ``numbers`` in place if all ranks gave the same signature; return whether they did.

        Numbers on a GPU, and numbers too large for the message of the signature, follow in a separate exchange. If
        numbers on a GPU were in the message, the message would wait until the GPU has done all work in progress.

        Args:
            numbers: contiguous, float64.
        """
        flat = numbers.view(-1)
        if flat.is_cpu and 0 < flat.nbytes <= self._most_summed:
            merged = self.merge(flat, _sum_rows, signed)
            if merged is not None:
                flat.copy_(merged)
            return merged is not None
        agreed = self.exchange(signed)
        if agreed and len(flat):
            self._group.all_reduce(flat)
        return agreed

    def merge(
        self, numbers: torch.Tensor, merge: Callable[[torch.Tensor], torch.Tensor], signed: bytes
    ) -> torch.Tensor | None:
        """Return the ``numbers`` of all ranks, merged into one row, if all gave the same signature; else None.

        Args:
            numbers: float64 on the CPU, contiguous, of one dimension.
            merge: reduces the rows of a tensor to one row. It is called with the rows of a host's ranks, in rank order,
                and then, if there are several hosts, with their merged rows.
        """

        def merged(rows: Sequence[memoryview]) -> memoryview:
            return memory(merge(torch.stack([torch.frombuffer(row, dtype=torch.float64) for row in rows])))

        found = self._group.merge(signed, memory(numbers), Merging(merged, merged))
        return None if found is None else torch.frombuffer(found, dtype=torch.float64).clone()

    @cached_property
    def _most_summed(self) -> int:
        """Most bytes that are summed in the message of the signature; more between hosts, where a ring is slower."""
        return self.room if self._group.most_messages is None else self._size


class PackedTensors:
    """Tensors of any floating types, packed into one piece of memory, which is allocated when it is first used.

    Args:
        kinds: type and shape of each tensor, in the same order on all ranks.
        as_type: maps the type of a tensor to the type in which it is sent.
    """

    def __init__(
        self, kinds: Sequence[tuple[torch.dtype, torch.Size]], as_type: Callable[[torch.dtype], torch.dtype]
    ) -> None:
        travelling = [as_type(dtype) for dtype, _ in kinds]
        self.keeps_types = all(
            given is dtype and dtype.itemsize >= 4 for (given, _), dtype in zip(kinds, travelling, strict=True)
        )
        """Whether all tensors are sent and averaged in their own types, each of 4 bytes or more."""
        self._kinds = [(dtype, shape) for dtype, (_, shape) in zip(travelling, kinds, strict=True)]
        self._by_type: dict[torch.dtype, list[int]] = {}
        for i, (dtype, _) in enumerate(self._kinds):
            self._by_type.setdefault(dtype, []).append(i)
        self._starts: dict[int, int] = {}
        """First byte of each tensor."""
        start = 0
        for part in self._by_type.values():
            for i in part:
                self._starts[i] = start
                start += size_of(*self._kinds[i])
            start = _aligned(start)
        self._num_bytes = start
        self.averaging: Callable[[bytes, Sequence[int], Sequence[int]], bool] | Literal[False] | None = None
        """Function that exchanges and averages all tensors in one call; False: the group has none, None: not asked."""
        self.merging = Merging(self._add_ranks, self._add_hosts)
        """Sums the packed tensors of the ranks."""

    @property
    def mine(self) -> list[torch.Tensor]:
        """Tensors that this rank fills with its values."""
        return self._memory.mine

    @property
    def averages(self) -> list[torch.Tensor]:
        """Tensors that receive the averages."""
        return self._memory.averages

    @property
    def packed(self) -> memoryview | None:
        """The memory of ``mine``; None without tensors."""
        return self._memory.packed if self._kinds else None

    @cached_property
    def addresses(self) -> tuple[list[int], list[int]]:
        """Addresses of ``mine`` and of ``averages``."""
        return [one.data_ptr() for one in self.mine], [one.data_ptr() for one in self.averages]

    def prepare(self, group: Group) -> Callable[[bytes, Sequence[int], Sequence[int]], bool] | Literal[False]:
        """Return the function for ``averaging``; False if ``group`` has none."""
        sections = [
            (self._starts[i] if shape.numel() else 0, shape.numel(), dtype)
            for i, (dtype, shape) in enumerate(self._kinds)
        ]
        return group.averaging(self._num_bytes, sections) or False

    def average(self, merged: memoryview, num_ranks: int) -> None:
        """Fill ``averages`` from ``merged``, the sums over ``num_ranks`` ranks that ``merging`` returned."""
        totals = self._memory.totals
        totals.copy_(torch.frombuffer(merged, dtype=torch.uint8))  # on one host, ``merged`` may be this memory
        for *_, total in self._memory.sections:
            total.div_(num_ranks)

    @cached_property
    def _memory(self) -> _PackedMemory:
        return _PackedMemory(self._kinds, self._by_type, self._num_bytes)

    def _add_ranks(self, rows: Sequence[memoryview]) -> memoryview:
        for start, own, _, total in self._memory.sections:
            _add([torch.frombuffer(row[start : start + own.nbytes], dtype=own.dtype) for row in rows], total)
        return memory(self._memory.totals)

    def _add_hosts(self, rows: Sequence[memoryview]) -> memoryview:
        for *_, start, total in self._memory.sections:
            _add([torch.frombuffer(row[start : start + total.nbytes], dtype=total.dtype) for row in rows], total)
        return memory(self._memory.totals)


class _PackedMemory:
    """The memory of ``PackedTensors``, three times their bytes."""

    def __init__(
        self, kinds: Sequence[tuple[torch.dtype, torch.Size]], by_type: dict[torch.dtype, list[int]], num_bytes: int
    ) -> None:
        mine: dict[int, torch.Tensor] = {}
        averages: dict[int, torch.Tensor] = {}
        self.sections: list[tuple[int, torch.Tensor, int, torch.Tensor]] = []
        start = end = 0
        packed = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        totals = torch.zeros(2 * num_bytes, dtype=torch.uint8, device="cpu")
        for dtype, part in by_type.items():
            sizes = [kinds[i][1].numel() for i in part]
            own = packed[start : start + sum(sizes) * dtype.itemsize].view(dtype)
            # Add halves as float32: their sum may not fit into a half, and this way it is rounded once.
            as_total = dtype if dtype.itemsize >= 4 else torch.float32
            total = totals[end : end + sum(sizes) * as_total.itemsize].view(as_total)
            if own.nbytes:
                self.sections.append((start, own, end, total))
            end += _aligned(total.nbytes)
            for i, a, b in zip(part, own.split(sizes), total.split(sizes), strict=True):
                mine[i], averages[i] = a.view(kinds[i][1]), b.view(kinds[i][1])
            start += _aligned(own.nbytes)
        self.mine = [mine[i] for i in range(len(kinds))]
        self.averages = [averages[i] for i in range(len(kinds))]
        self.packed = memory(packed)
        self.totals = totals[:end]


def size_of(dtype: torch.dtype, shape: torch.Size) -> int:
    """Return the size of a tensor in bytes."""
    return shape.numel() * dtype.itemsize


def signature(identity: bytes) -> bytes:
    """Return the ``SIZE`` bytes of the hash of ``identity``."""
    return hashlib.blake2b(identity, digest_size=SIZE).digest()


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``rows`` in their order, so that it is the same on all ranks, bit for bit."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _add(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Set ``total`` to the sum of ``parts`` in their order, so that it is the same on all ranks, bit for bit."""
    first, *others = parts if parts[0].dtype == total.dtype else [part.to(total.dtype) for part in parts]
    if not others:
        total.copy_(first)
    for other in others:
        torch.add(first, other, out=total)
        first = total


def is_plain_cpu_tensor(one: torch.Tensor) -> bool:
    """Return whether ``one`` is a contiguous CPU tensor of no subclass, without lazy bits (negation, zero tensor)."""
    # Check the layout first: ``is_contiguous`` raises an error for a sparse tensor.
    return (
        type(one) is torch.Tensor
        and one.is_cpu
        and one.layout is torch.strided
        and one.is_contiguous()
        and not one.is_neg()
        and not one._is_zerotensor()
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous ``tensor`` on the CPU."""
    found: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(found)
