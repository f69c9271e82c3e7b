"""``Layout``: decides how each gradient of a backward travels; backwards that reach the same leaves share a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.exchange.agreement_exchange import PackedTensors, signature

if TYPE_CHECKING:
    from lagom.gradients.reduction.mean import Reduction

ALONE = 1 << 20
"""Bytes from which a gradient has a bucket of its own: copying it would take longer than another exchange."""
TOGETHER = 4 << 20
"""Bytes of smaller gradients that fill a bucket."""


class LayoutEntry(NamedTuple):
    """The facts about one gradient on which all ranks must agree."""

    number: int
    dtype: torch.dtype
    shape: torch.Size
    sparse: bool
    """Whether the gradient is sparse, or in the layout of oneDNN."""
    cuda: bool


@dataclass(frozen=True)
class Bucket:
    """Gradients of one type and kind of device that travel together, by their indices in the layout."""

    indices: list[int]


class Layout:
    """Sorts gradients by their way: with the signature (small), in a bucket (other dense ones), or alone.

    Args:
        kind: name of the exchange.
        entries: the gradients, in the order in which they will be passed.
        room: bytes for gradients in the message with the signature.
        reduction: how gradients are combined; None for the mean.
    """

    def __init__(self, kind: str, entries: list[LayoutEntry], room: int, reduction: Reduction | None = None) -> None:
        as_type = wire_dtype if reduction is None else reduction.wire_dtype
        self.reduction = reduction
        self.entries = entries
        self.numbers = [entry.number for entry in entries]
        # Sorted, since ranks may walk equal graphs in different orders.
        self.order = sorted(range(len(entries)), key=self.numbers.__getitem__)
        self.identity = repr((kind, [entries[i] for i in self.order])).encode()
        self.signature = signature(self.identity)
        self.is_new = True
        self.unseen: list[int] = []
        self.framed: list[int] = []
        self.sparse: list[int] = []
        rest: dict[tuple[bool, torch.dtype], list[int]] = {}
        for i in self.order:
            entry = entries[i]
            size = entry.shape.numel() * as_type(entry.dtype).itemsize
            if entry.sparse:
                self.sparse.append(i)
            elif not entry.cuda and size <= room:
                self.framed.append(i)
                room -= size
            else:
                rest.setdefault((entry.cuda, entry.dtype), []).append(i)
        self.packed = PackedTensors([(entries[i].dtype, entries[i].shape) for i in self.framed], as_type)
        # Reversed, since a backward reaches the last parameters first.
        self.buckets = [bucket for part in rest.values() for bucket in _make_buckets(part[::-1], entries)]
        sizes = [0, 0]
        for (cuda, dtype), part in rest.items():
            sizes[cuda] += sum(entries[i].shape.numel() for i in part) * dtype.itemsize
        self.on_cpu, self.on_gpu = sizes
        """Bytes of all buckets on the CPU, and on GPUs."""


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of ``dtype`` are sent: one that gloo and NCCL can add."""
    return dtype if dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16) else torch.float32


def _make_buckets(indices: list[int], entries: list[LayoutEntry]) -> list[Bucket]:
    buckets: list[Bucket] = []
    together: list[int] = []
    num_bytes = 0
    for i in indices:
        size = entries[i].shape.numel() * entries[i].dtype.itemsize
        if size >= ALONE:
            buckets.append(Bucket([i]))
            continue
        together.append(i)
        num_bytes += size
        if num_bytes >= TOGETHER:
            buckets.append(Bucket(together))
            together, num_bytes = [], 0
    return [*buckets, Bucket(together)] if together else buckets
