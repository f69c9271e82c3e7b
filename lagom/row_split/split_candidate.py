"""``SplitCandidate`` and ``SplitFinding``: a call that ranks might split by rows, and facts about such calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from lagom.row_split.draws import DrawKind
from lagom.row_split.recorder import FlopCounter
from lagom.row_split.whole_batch import RowBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


@dataclass(frozen=True)
class SplitCandidate:
    """A call of a module that might be sliced."""

    module: nn.Module
    inside: Sequence[nn.Module]
    """The module and all modules inside it."""
    run: Callable[[list[Any]], Any]
    """Calls the module with other leaves of its arguments."""
    leaves: list[Any]
    """Leaves of the arguments."""
    spec: TreeSpec
    """Structure of the arguments."""
    rows: int
    """Rows of the batch: leaves with this number of rows are sliced."""
    device: torch.device

    @property
    def is_uniform(self) -> bool:
        """Return whether all rows of the batch are equal: then a mean over them is each of them, and shows nothing."""
        batches = [leaf for leaf in self.leaves if is_batch(leaf, self.rows)]
        return self.rows > 1 and bool(batches) and all(bool((leaf == leaf[:1]).all()) for leaf in batches)

    def cut_leaves(self, block: RowBlock) -> list[Any]:
        """Return the leaves for one block."""
        return [
            like_given(block.of(leaf.detach()), leaf) if is_batch(leaf, self.rows) else leaf for leaf in self.leaves
        ]


@dataclass
class SplitFinding:
    """Facts about a module's forward on inputs of one kind."""

    rows: int
    """Rows of the batch that was probed."""
    flops: float = 0.0
    """Operations for these rows."""
    num_bytes: int = 0
    """Size of the outputs for these rows."""
    spec: TreeSpec | None = None
    """Structure of the outputs."""
    factors: list[int | None] = field(default_factory=list)
    """Rows of each output per row of the batch; None for an output that is no tensor."""
    orders: list[tuple[int, ...] | None] = field(default_factory=list)
    """Dimensions of each output in the order of memory; None where they lie in order."""
    bases: list[int | None] = field(default_factory=list)
    """Of each output that is a view of another one, the index of that one; None for the others."""
    axes: dict[DrawKind, int | None] = field(default_factory=dict)
    """Row dimensions of the random draws; see ``Draws``."""
    reason: str | None = None
    """Why it runs whole on every rank; None if it is sliced."""
    sliced: bool = False
    """The probe has shown that it computes its rows one by one."""
    repeats: bool = False
    """The probe has shown that it changes no state, so that it can be repeated."""


def like_given(copy: Tensor, leaf: Tensor) -> Tensor:
    """Return ``copy`` with a gradient if ``leaf`` has one, and no leaf then, which cannot be changed in place."""
    return copy.requires_grad_().view_as(copy) if leaf.requires_grad and torch.is_grad_enabled() else copy


def is_batch(leaf: Any, rows: int) -> bool:
    """Return whether ``leaf`` is a tensor with a row for each sample."""
    return is_dense(leaf) and leaf.dim() > 0 and leaf.shape[0] == rows


def is_dense(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor whose rows lie one after the other; a sparse or nested one is not."""
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def measure_call(candidate: SplitCandidate, call: Callable[[], Any]) -> tuple[Any, SplitFinding]:
    """Make the ``call``; return its output and a finding with its amount of work."""
    with FlopCounter() as counter:
        output = call()
    own = sum(parameter.numel() for parameter in candidate.module.parameters())
    num_bytes = sum(o.numel() * o.element_size() for o in tree_flatten(output)[0] if isinstance(o, torch.Tensor))
    return output, SplitFinding(candidate.rows, max(counter.flops, 2.0 * own * candidate.rows), num_bytes)
