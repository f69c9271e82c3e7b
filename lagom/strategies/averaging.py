"""``Averager``: tensors averaged over the ranks in place, if all ranks mean the same ones."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch

from lagom.strategies.layout import Bucket, Entry, Layout, travelling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.group import Group
    from lagom.strategies.frame import Frame

_MAX_LAYOUTS = 64


class Averager:
    """Averages gradients; the small ones along with the signature by which ranks agree on what there is.

    Args:
        frame: of size 0 where gradients are on GPUs.
        forgotten: called when old layouts are dropped.
    """

    def __init__(self, group: Group, frame: Frame, forgotten: Callable[[], None]) -> None:
        self._group = group
        self._frame = frame
        self._forgotten = forgotten
        self._layouts: dict[object, Layout] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def layout(self, kind: str, numbers: Sequence[int], gradients: Sequence[torch.Tensor]) -> Layout:
        """Where ``gradients`` travel; the same object as long as the same ones are given.

        Args:
            kind: what is averaged; what ranks call differently is not mixed.
        """
        entries = tuple(
            (number, gradient.dtype, gradient.shape, gradient.is_sparse, gradient.is_cuda)
            for number, gradient in zip(numbers, gradients, strict=True)
        )
        found = self._layouts.get((kind, entries))
        if found is None:
            if len(self._layouts) == _MAX_LAYOUTS:
                self._layouts.clear()
                self._forgotten()
            found = Layout(kind, [Entry(*parts) for parts in entries], self._frame.room)
            self._layouts[kind, entries] = found
        return found

    def average(self, layout: Layout, gradients: Sequence[torch.Tensor], signed: bytes) -> bool:
        """Average ``gradients`` in place if all ranks gave the same ``signed``; otherwise nothing has changed."""
        framed = [gradients[i] for i in layout.framed]
        if framed:
            torch._foreach_copy_(layout.parcel.mine, framed)
        if not self._frame.average(layout.parcel, signed):
            return False
        if framed:
            torch._foreach_copy_(framed, layout.parcel.averages)
        for bucket in layout.buckets:
            self._average_bucket(bucket, gradients)
        for i in layout.sparse:
            self._average_sparse(gradients[i])
        return True

    def _average_bucket(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> None:
        mine = [gradients[i] for i in bucket.indices]
        first = mine[0]
        alone = len(mine) == 1 and first.is_contiguous() and travelling(first.dtype) == first.dtype
        flat = first.view(-1) if alone else self._buffer(sum(bucket.sizes), first)
        views = [part.view_as(like) for part, like in zip(torch.split(flat, bucket.sizes), mine, strict=True)]
        if not alone:
            torch._foreach_copy_(views, mine)
        if flat.element_size() < 4:  # the sum of halves may not fit
            flat.div_(self._group.world_size)
            self._group.all_reduce(flat)
        else:
            self._group.all_reduce(flat)
            flat.div_(self._group.world_size)
        if not alone:
            torch._foreach_copy_(mine, views)

    def _buffer(self, size: int, like: torch.Tensor) -> torch.Tensor:
        dtype = travelling(like.dtype)
        key = (like.device, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=like.device)
        return buffer[:size]

    def _average_sparse(self, gradient: torch.Tensor) -> None:
        mine = gradient.coalesce()
        sent = pickle.dumps((mine.indices().cpu(), mine.values().cpu()))
        parts = [pickle.loads(part) for part in self._group.all_gather_bytes(sent)]
        # An empty one, of a rank that did not reach the leaf, may be laid out differently.
        parts = [part for part in parts if part[1].numel()] or parts[:1]
        indices = torch.cat([part[0] for part in parts], dim=1)
        values = torch.cat([part[1] for part in parts]).div_(self._group.world_size)
        total = torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False).coalesce()
        gradient.copy_(total.to(gradient.device))


def real(gradient: torch.Tensor) -> torch.Tensor:
    """A view of ``gradient`` as real numbers."""
    return torch.view_as_real(gradient) if gradient.is_complex() and not gradient.is_sparse else gradient
