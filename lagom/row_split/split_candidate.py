"""``SplitCandidate`` and ``SplitFinding``: a call whose rows might be shared out, and what is known of such calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from lagom.row_split.draws import Kind
from lagom.row_split.recorder import Work
from lagom.row_split.whole_batch import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class SplitCandidate:
    """A call of a module that might be sliced."""

    module: nn.Module
    inside: Sequence[nn.Module]
    """All its modules."""
    run: Callable[[list[Any]], Any]
    """Calls the module with these leaves of its arguments."""
    leaves: list[Any]
    """Of its arguments."""
    rows: int
    """Of the batch: the leaves with so many are sliced."""
    device: torch.device

    @property
    def is_uniform(self) -> bool:
        """Whether the rows of its batch are all alike: a mean over them would be each of them, and nothing seen."""
        batches = [leaf for leaf in self.leaves if is_batch(leaf, self.rows)]
        return self.rows > 1 and bool(batches) and all(bool((leaf == leaf[:1]).all()) for leaf in batches)

    def block_of(self, block: Block) -> list[Any]:
        """The leaves for one block."""
        return [block.of(leaf.detach()) if is_batch(leaf, self.rows) else leaf for leaf in self.leaves]


@dataclass
class SplitFinding:
    """What is known of a module's forward on inputs of one kind."""

    rows: int
    """Of the batch that it was looked at with."""
    flops: float = 0.0
    """For these rows."""
    num_bytes: int = 0
    """Of its outputs, for these rows."""
    spec: TreeSpec | None = None
    """How its outputs are laid out."""
    factors: list[int | None] = field(default_factory=list)
    """Of each output, rows per row of the batch; None for what is no tensor."""
    axes: dict[Kind, int | None] = field(default_factory=dict)
    """Its random draws; see ``Draws``."""
    reason: str | None = None
    """Why it runs whole on every rank; None: it is sliced."""
    sliced: bool = False
    """It was found to compute its rows one by one."""


def is_batch(leaf: Any, rows: int) -> bool:
    """Whether ``leaf`` is a tensor with a row for each sample."""
    return is_dense(leaf) and leaf.dim() > 0 and leaf.shape[0] == rows


def is_dense(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor that has its rows one after the other: a sparse or a nested one has not."""
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def measured(candidate: SplitCandidate, call: Callable[[], Any]) -> tuple[Any, SplitFinding]:
    """Make the ``call``; its output, and how much work it was."""
    with Work() as work:
        output = call()
    own = sum(parameter.numel() for parameter in candidate.module.parameters())
    num_bytes = sum(o.numel() * o.element_size() for o in tree_flatten(output)[0] if isinstance(o, torch.Tensor))
    return output, SplitFinding(candidate.rows, max(work.flops, 2.0 * own * candidate.rows), num_bytes)
