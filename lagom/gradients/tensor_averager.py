"""``TensorAverager``: averages tensors over the ranks in place, if all ranks agree on which tensors these are."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from lagom.exchange.plain_values import all_gather_values
from lagom.gradients.reduction.buckets import Layout, LayoutEntry, Mean
from lagom.run_state.memory_layout import resolve_lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.exchange.agreement_exchange import AgreedExchange
    from lagom.exchange.group import Group
    from lagom.gradients.reduction.buckets import Reduction

Compare: TypeAlias = "Callable[[Layout, Sequence[torch.Tensor], bytes], bool | None]"
_MAX_LAYOUTS = 64


class TensorAverager:
    """Averages gradients. Small ones travel in the message with the signature on which ranks must agree.

    Args:
        frame: the exchange of signatures; it has no room for gradients if these are on accelerators.
        forgotten: called when old layouts are dropped.
        reduction: how the gradients of backwards are combined: mean, compressed or Adasum.
    """

    def __init__(
        self, group: Group, frame: AgreedExchange, forgotten: Callable[[], None], reduction: Reduction
    ) -> None:
        self._mean = Mean(group)
        self._reduction = reduction
        self._group = group
        self._frame = frame
        self._on_forget = forgotten
        self._layouts: dict[object, Layout] = {}
        self.compare: Compare = lambda *_: None
        """Returns whether all ranks have the same gradients and signature; None if gradients have to be averaged."""

    def find_layout(
        self, kind: str, numbers: Sequence[int], gradients: Sequence[torch.Tensor], *, by_mean: bool = False
    ) -> Layout:
        """Return the layout in which ``gradients`` travel: the same object for equal arguments, until it is dropped.

        Args:
            kind: name of the exchange; ranks that give different names do not exchange gradients.
            numbers: the leaves' numbers, in the order of ``gradients``.
            by_mean: whether to use the mean, and not the run's reduction.
        """
        entries = tuple(
            (number, gradient.dtype, gradient.shape, gradient.is_sparse or gradient.is_mkldnn, not gradient.is_cpu)
            for number, gradient in zip(numbers, gradients, strict=True)
        )
        layout = self._layouts.get((kind, entries))
        if layout is None:
            if len(self._layouts) == _MAX_LAYOUTS:
                self._layouts.clear()
                self._on_forget()
            reduction = self._mean if by_mean else self._reduction
            room = reduction.frame_bytes(self._frame.room_to_merge)
            layout = Layout(kind, [LayoutEntry(*parts) for parts in entries], room, reduction)
            self._layouts[kind, entries] = layout
        return layout

    def average(
        self,
        layout: Layout,
        gradients: Sequence[torch.Tensor],
        signed: bytes,
        *,
        compares: bool = False,
        are_plain: bool = False,
    ) -> bool:
        """Combine ``gradients`` in place, by the reduction of ``layout``, if all ranks passed the same ``signed``.

        Args:
            signed: this rank's signature.
            compares: whether to call ``compare`` first: gradients that are equal on all ranks then stay as they are.
            are_plain: whether ``is_plain_cpu_tensor`` is known to be true for all gradients, which saves the check.

        Returns:
            Whether the signatures were equal. False, with unchanged gradients, also if ``compare`` found a difference.
        """
        if compares and (agreed := self.compare(layout, gradients, signed)) is not None:
            return agreed
        framed = [gradients[i] for i in layout.framed]
        if not self._frame.average(layout.packed, framed, signed, are_plain=are_plain):
            return False
        assert layout.reduction is not None
        layout.reduction.reduce(layout, gradients)
        for i in layout.sparse:
            if gradients[i].is_mkldnn:
                self._average_opaque(gradients[i])
            else:
                self._average_sparse(gradients[i])
        return True

    def _average_opaque(self, gradient: torch.Tensor) -> None:
        """Average a gradient in oneDNN's layout, whose memory cannot be read."""
        total = torch.stack(all_gather_values(self._group, gradient.to_dense())).sum(0)
        gradient.copy_(total.div_(self._group.world_size).to_mkldnn())

    def _average_sparse(self, gradient: torch.Tensor) -> None:
        mine = gradient.coalesce()
        parts = all_gather_values(self._group, (mine.indices(), mine.values()))
        # A rank that did not reach the leaf sends an empty gradient, whose indices may have another shape.
        parts = [part for part in parts if part[1].numel()] or parts[:1]
        indices = torch.cat([part[0] for part in parts], dim=1)
        values = torch.cat([part[1] for part in parts]).div_(self._group.world_size)
        total = torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False).coalesce()
        gradient.copy_(total.to(gradient.device))


def view_as_real(gradient: torch.Tensor) -> torch.Tensor:
    """Return a view of a complex ``gradient`` as real numbers; other gradients are returned unchanged."""
    return torch.view_as_real(gradient) if gradient.is_complex() and not gradient.is_sparse else gradient


def real_gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``leaf`` as real numbers in memory, which are to be averaged in place."""
    assert leaf.grad is not None
    if leaf.grad.layout is torch.strided:
        resolved = resolve_lazy(leaf.grad)
        if resolved is not leaf.grad:
            leaf.grad = resolved
    return view_as_real(leaf.grad)
