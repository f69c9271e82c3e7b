"""``AgreedExchange``: an exchange in which ranks notice when they mean different things, whatever it carries."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.group import Group

SIZE = 32
"""Bytes of a signature; a multiple of 16, so that numbers of any type may follow."""
FRAME = 1 << 17
"""Bytes that a rank sends along with signatures, to all others together, rather than in an exchange of their own."""


class AgreedExchange:
    """Signatures, and numbers that travel along with them. See Note [Which gradients].

    Args:
        size: see ``FRAME``; 0 where numbers are on GPUs.
    """

    def __init__(self, group: Group, size: int = FRAME) -> None:
        self.room = size // max(group.world_size - 1, 1)
        """Bytes that a signature may be followed by."""
        self._group = group

    def exchange(self, signed: bytes) -> bool:
        """Whether all ranks gave the same signature."""
        return all(row == signed for row in self._group.exchange(signed))

    def gather(self, body: memoryview | None, signed: bytes) -> list[memoryview | None] | None:
        """The bodies of all ranks, in rank order, if all gave the same signature; else None.

        Valid until the next exchange of the group. In this rank's own place is None.
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

        Those on a GPU follow in an exchange of their own: to send them along would wait for all that is under way
        there.
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
        as_type: the type as which one travels.
    """

    def __init__(
        self, kinds: Sequence[tuple[torch.dtype, torch.Size]], as_type: Callable[[torch.dtype], torch.dtype]
    ) -> None:
        travelling = [as_type(dtype) for dtype, _ in kinds]
        self.keeps_types = all(
            given is dtype and dtype.itemsize >= 4 for (given, _), dtype in zip(kinds, travelling, strict=True)
        )
        """Whether tensors, what travels and averages are of the same types."""
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
            # Halves are added as float32: their sum may not fit, and is rounded once.
            total = torch.zeros(sum(sizes), dtype=dtype if dtype.itemsize >= 4 else torch.float32)
            self._sections.append((start, own, total))
            for i, a, b in zip(part, own.split(sizes), total.split(sizes), strict=True):
                mine[i], averages[i] = a.view(kinds[i][1]), b.view(kinds[i][1])
            start += _aligned(num_bytes)
        self.mine = [mine[i] for i in range(len(kinds))]
        """Where this rank's go."""
        self.averages = [averages[i] for i in range(len(kinds))]
        """Where the averages will be."""
        self.packed = memory(packed) if kinds else None
        self.averaging: Callable[[bytes, Sequence[int], Sequence[int]], bool] | Literal[False] | None = None
        """Does all of it in one call, where the group can; None: not asked yet."""
        self.addresses = [one.data_ptr() for one in self.mine], [one.data_ptr() for one in self.averages]
        self._memory = packed

    def prepare(self, group: Group) -> Callable[[bytes, Sequence[int], Sequence[int]], bool] | Literal[False]:
        """What ``averaging`` should be."""
        origin = self._memory.data_ptr()
        sections = [(one.data_ptr() - origin if one.numel() else 0, one.numel(), one.dtype) for one in self.mine]
        return group.averaging(self._memory.nbytes, sections) or False

    def average(self, rows: Sequence[memoryview | None]) -> None:
        """Fill ``averages`` from what the ranks packed; None stands for this one's."""
        for start, own, total in self._sections:
            end = start + own.nbytes
            _add([own if row is None else torch.frombuffer(row[start:end], dtype=own.dtype) for row in rows], total)
            total.div_(len(rows))


def size_of(dtype: torch.dtype, shape: torch.Size) -> int:
    """Bytes."""
    return shape.numel() * dtype.itemsize


def signature(identity: bytes) -> bytes:
    """``SIZE`` bytes that tell ``identity``."""
    return hashlib.blake2b(identity, digest_size=SIZE).digest()


def _add(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """In the order of ranks, which makes the sum the same on all of them, bit for bit."""
    first, *others = parts if parts[0].dtype == total.dtype else [part.to(total.dtype) for part in parts]
    if not others:
        total.copy_(first)
    for other in others:
        torch.add(first, other, out=total)
        first = total


def lies_plainly(one: torch.Tensor) -> bool:
    """Whether the numbers of ``one`` are what is in the memory of this process, one behind the other."""
    # Not what looks sparse: to ask a sparse tensor for its order in memory is an error.
    return (
        type(one) is torch.Tensor
        and one.is_cpu
        and one.layout is torch.strided
        and one.is_contiguous()
        and not one.is_neg()
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def memory(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous ``tensor`` on the CPU."""
    found: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(found)
