"""``AgreedExchange``: an exchange that detects ranks with different signatures."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.group import Group

SIZE = 32
"""Bytes of a signature; a multiple of 16, so that elements of any type may follow."""
FRAME = 1 << 17
"""Bytes that a rank sends along with signatures, to all other ranks together; more bytes take a separate exchange."""


class AgreedExchange:
    """Exchanges signatures, and small tensors in the same message, which are used only if all signatures are equal.

    See Note [Which gradients] in gradients/gradient_averager.py.

    Args:
        size: bytes that may follow the signatures to all other ranks together; 0 when the tensors are on GPUs.
    """

    def __init__(self, group: Group, size: int = FRAME) -> None:
        self.room = size // max(group.world_size - 1, 1)
        """Bytes that may follow a signature."""
        self._group = group

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
        self, parcel: PackedTensors, tensors: list[torch.Tensor], signed: bytes, *, lie_plainly: bool = False
    ) -> bool:
        """Average ``tensors``, of the kinds of ``parcel``, in place if all ranks gave the same signature.

        Args:
            lie_plainly: whether all of them are known to lie plainly in memory.
        """
        if parcel.averaging is None:
            parcel.averaging = parcel.prepare(self._group)
        if parcel.averaging and parcel.keeps_types and (lie_plainly or all(map(lies_plainly, tensors))):
            addresses = [one.data_ptr() for one in tensors]
            return parcel.averaging(signed, addresses, addresses)
        if tensors:
            torch._foreach_copy_(parcel.mine, tensors)
        if parcel.averaging:
            agreed = parcel.averaging(signed, *parcel.addresses)
        else:
            rows = self.gather(parcel.packed, signed)
            agreed = rows is not None
            if rows is not None:
                parcel.average(rows)
        if agreed and tensors:
            torch._foreach_copy_(tensors, parcel.averages)
        return agreed

    def sum(self, numbers: torch.Tensor, signed: bytes) -> bool:
        """Sum ``numbers``, contiguous float64, over the ranks, in place, if all gave the same signature.

        Numbers on a GPU follow in a separate exchange: sending them with the signature would wait for all GPU work
        under way.
        """
        flat = numbers.view(-1)
        travels = 0 < flat.nbytes <= self.room and flat.is_cpu
        rows = self.gather(memory(flat) if travels else None, signed)
        if rows is None:
            return False
        if travels:
            _add([flat.clone() if row is None else torch.frombuffer(row, dtype=flat.dtype) for row in rows], flat)
        elif len(flat):
            self._group.all_reduce(flat)
        return True


class PackedTensors:
    """Tensors of any floating types, packed into one piece of memory.

    Args:
        kinds: type and shape of each; their order is the same on all ranks.
        as_type: returns the type in which a tensor of a type is sent.
    """

    def __init__(
        self, kinds: Sequence[tuple[torch.dtype, torch.Size]], as_type: Callable[[torch.dtype], torch.dtype]
    ) -> None:
        travelling = [as_type(dtype) for dtype, _ in kinds]
        self.keeps_types = all(
            given is dtype and dtype.itemsize >= 4 for (given, _), dtype in zip(kinds, travelling, strict=True)
        )
        """Whether tensors, what is sent of them, and averages have the same types."""
        kinds = [(dtype, shape) for dtype, (_, shape) in zip(travelling, kinds, strict=True)]
        by_type: dict[torch.dtype, list[int]] = {}
        for i, (dtype, _) in enumerate(kinds):
            by_type.setdefault(dtype, []).append(i)
        mine: dict[int, torch.Tensor] = {}
        averages: dict[int, torch.Tensor] = {}
        self._sections: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        start = 0
        num_bytes = sum(_aligned(sum(size_of(*kinds[i]) for i in part)) for part in by_type.values())
        packed = torch.zeros(num_bytes, dtype=torch.uint8)
        for dtype, part in by_type.items():
            sizes = [kinds[i][1].numel() for i in part]
            num_bytes = sum(sizes) * dtype.itemsize
            own = packed[start : start + num_bytes].view(dtype)
            # Add halves as float32: their sum may not fit into a half, and this way it is rounded once.
            total = torch.zeros(sum(sizes), dtype=dtype if dtype.itemsize >= 4 else torch.float32)
            self._sections.append((start, own, total))
            for i, a, b in zip(part, own.split(sizes), total.split(sizes), strict=True):
                mine[i], averages[i] = a.view(kinds[i][1]), b.view(kinds[i][1])
            start += _aligned(num_bytes)
        self.mine = [mine[i] for i in range(len(kinds))]
        """Tensors that this rank fills with its values."""
        self.averages = [averages[i] for i in range(len(kinds))]
        """Tensors that receive the averages."""
        self.packed = memory(packed) if kinds else None
        self.averaging: Callable[[bytes, Sequence[int], Sequence[int]], bool] | Literal[False] | None = None
        """Exchanges and averages everything in one call; False: the group cannot, None: not asked yet."""
        self.addresses = [one.data_ptr() for one in self.mine], [one.data_ptr() for one in self.averages]
        self._memory = packed

    def prepare(self, group: Group) -> Callable[[bytes, Sequence[int], Sequence[int]], bool] | Literal[False]:
        """Return the value for ``averaging``."""
        origin = self._memory.data_ptr()
        sections = [(one.data_ptr() - origin if one.numel() else 0, one.numel(), one.dtype) for one in self.mine]
        return group.averaging(self._memory.nbytes, sections) or False

    def average(self, rows: Sequence[memoryview | None]) -> None:
        """Fill ``averages`` from the ranks' packed bytes; None stands for this rank's."""
        for start, own, total in self._sections:
            end = start + own.nbytes
            _add([own if row is None else torch.frombuffer(row[start:end], dtype=own.dtype) for row in rows], total)
            total.div_(len(rows))


def size_of(dtype: torch.dtype, shape: torch.Size) -> int:
    """Return the size of a tensor in bytes."""
    return shape.numel() * dtype.itemsize


def signature(identity: bytes) -> bytes:
    """Return the ``SIZE`` bytes of the hash of ``identity``."""
    return hashlib.blake2b(identity, digest_size=SIZE).digest()


def _add(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Add ``parts`` in rank order, so that the sum is the same on all ranks, bit for bit."""
    first, *others = parts if parts[0].dtype == total.dtype else [part.to(total.dtype) for part in parts]
    if not others:
        total.copy_(first)
    for other in others:
        torch.add(first, other, out=total)
        first = total


def lies_plainly(one: torch.Tensor) -> bool:
    """Return whether the elements of ``one`` are in this process's memory as they are, one behind the other."""
    # The layout comes first: asking a sparse tensor for its order in memory is an error.
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
