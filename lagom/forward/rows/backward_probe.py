"""``BackwardProbe`` and ``MadeLeaves``: what a probe finds in the graph of a forward's outputs.

See Note [Backwards of programs] and Note [Leaves that a forward makes].
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from lagom.forward.rows.comparison import are_close
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.inspection.reads import is_tensor
from lagom.patching.object_reference import HiddenReference
from lagom.random_states import equal_random_states, random_states
from lagom.run_state.leaf_hooks import has_hooks
from lagom.run_state.leaves import find_leaves
from lagom.run_state.loss_terms import find_nodes, root_nodes
from lagom.run_state.memory_layout import storage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.forward.rows.row_places import RowPlace
    from lagom.forward.rows.split_candidate import SplitCandidate
    from lagom.forward.rows.whole_batch import RowBlock

_SCALES = {torch.float16: (2.0**8, 2.0**-8)}
"""Powers of two by which gradients are scaled, for types with a small range; ``_WIDE`` holds for all others."""
_WIDE = (2.0**40, 2.0**-40)


class BackwardProbe:
    """Checks whether a backward works row by row, if its graph has functions that are neither torch's nor lagom's.

    It compares gradients of blocks of rows with gradients of the whole batch. See Note [Backwards of programs].

    Args:
        parameters: the module's parameters.
        tolerance: relative tolerance of the comparison.
    """

    def __init__(self, parameters: Sequence[Tensor], tolerance: float) -> None:
        self._parameters = [one for one in parameters if one.requires_grad]
        self._tolerance = tolerance
        self.is_needed = False
        self._roots: list[Tensor | None] = []
        self._whole: list[Tensor | None] = []
        self._parts: list[list[Tensor | None]] = []

    def look_at(self, outputs: Sequence[Any]) -> None:
        """Set ``is_needed``: whether the graph of ``outputs`` has a function that is neither torch's nor lagom's."""
        self.is_needed = _has_own_function(outputs)

    def run_whole(self, candidate: SplitCandidate, inputs: list[Any], places: Sequence[RowPlace | None]) -> None:
        """Run forward and backward of a whole batch.

        Raises:
            NotByRowsError: when the backward draws random numbers, or is not proportional to the outputs' gradient.
        """
        outputs = candidate.outputs(inputs, places)[0]
        generator = torch.Generator().manual_seed(0)
        self._roots = [
            torch.randn(one.shape, generator=generator, device="cpu").to(one.device, one.dtype)
            if _is_root(one)
            else None
            for one in outputs
        ]
        before = random_states()
        self._whole = self._run(outputs, inputs, self._roots)
        if not equal_random_states(before, random_states()):
            raise NotByRowsError(WholeReason.OWN_BACKWARD)
        kinds = {one.dtype for one in (*self._parameters, *inputs, *outputs) if is_tensor(one)}
        for scale in next((_SCALES[kind] for kind in kinds if kind in _SCALES), _WIDE):
            scaled = self._run(outputs, inputs, [None if one is None else one * scale for one in self._roots])
            self._compare([None if one is None else one / scale for one in scaled], self._whole)

    def run_block(
        self, outputs: Sequence[Any], factors: Sequence[int | None], inputs: Sequence[Any], block: RowBlock
    ) -> None:
        """Run the backward of one block, if ``is_needed``.

        Args:
            factors: for each output its rows per row of the batch; None for an output without rows.
        """
        if self.is_needed:
            roots = [
                root if root is None or factor is None else block.of(root, factor)
                for root, factor in zip(self._roots, factors, strict=True)
            ]
            self._parts.append(self._run(outputs, inputs, roots))

    def compare(self) -> None:
        """Compare the gradients of the blocks with the gradients of the whole batch.

        Raises:
            NotByRowsError: when they differ.
        """
        if not self.is_needed:
            return
        num = len(self._parameters)
        found: list[Tensor | None] = []
        for i, parts in enumerate(zip(*self._parts, strict=True)):
            present = [part for part in parts if part is not None]
            whole = torch.stack(present).sum(0) if present and i < num else torch.cat(present) if present else None
            found.append(whole)
        self._compare(found, self._whole)

    def _run(
        self, outputs: Sequence[Any], inputs: Sequence[Any], roots: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        chosen = [(one, root) for one, root in zip(outputs, roots, strict=True) if root is not None]
        wanted = [*self._parameters, *filter(_is_root, inputs)]
        found = torch.autograd.grad(
            [one for one, _ in chosen], wanted, [root for _, root in chosen], retain_graph=True, allow_unused=True
        )
        return [one if one is None else one.to_dense() for one in found]

    def _compare(self, found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
        for one, other in zip(found, wanted, strict=True):
            one = torch.zeros_like(other) if one is None and other is not None else one
            other = torch.zeros_like(one) if other is None and one is not None else other
            if one is not None and other is not None and not are_close(one, other, self._tolerance):
                raise NotByRowsError(WholeReason.OWN_BACKWARD)


def _is_root(one: Any) -> bool:
    return is_tensor(one) and one.requires_grad


def _has_own_function(outputs: Sequence[Any]) -> bool:
    """Return whether the graph of ``outputs`` has a function whose backward is neither torch's nor lagom's."""
    return any(_is_own(node) for node in find_nodes(root_nodes([one for one in outputs if _is_root(one)])))


def has_checkpoint(outputs: Sequence[Any]) -> bool:
    """Return whether the graph of ``outputs`` has a reentrant checkpoint, which runs its part again in the backward."""
    nodes = find_nodes(root_nodes([one for one in outputs if _is_root(one)]))
    return any(getattr(type(node), "_forward_cls", None) is CheckpointFunction for node in nodes)


def _is_own(node: Any) -> bool:
    kind = type(node)
    if not issubclass(kind, BackwardCFunction):
        return kind.__name__ == "CppFunction"
    owner: type = kind._forward_cls  # type: ignore[attr-defined]  # made by the metaclass
    return not owner.__module__.startswith(("torch.", "lagom.")) or owner.__name__.startswith("Generated")


class MadeLeaves:
    """Finds out in a probe whether a forward makes leaves; refuses those that the program can read afterwards."""

    def __init__(self) -> None:
        self.are_made = False
        """Whether the forward makes leaves that only its graph holds."""
        self._weights: list[Tensor] | None = None
        """Leaves of the first run, without Parameters, that were alive when its graph was gone."""
        self._refs: list[HiddenReference[Tensor]] = []

    def look_at(self, outputs: Sequence[Any], given: Sequence[Any]) -> None:
        """Note the leaves in the graph of ``outputs``, which a forward has made of ``given``.

        Raises:
            NotByRowsError: when an output is a leaf that the forward has made.
        """
        own = {id(leaf) for leaf in (*given, *find_leaves(_with_graph(given)))}
        leaves = [leaf for leaf in find_leaves(_with_graph(outputs)) if id(leaf) not in own]
        leaves = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)]
        if any(leaf is output for leaf in leaves for output in outputs):
            raise NotByRowsError(WholeReason.GIVES_LEAF)
        self._refs = [HiddenReference(leaf) for leaf in leaves]

    def compare(self) -> None:
        """Compare the leaves that outlive the graph with those of the first run; call this when the graph is gone.

        Raises:
            NotByRowsError: when a leaf of this run is kept: a weight would be the same object in each run.
        """
        alive = [leaf for ref in self._refs if (leaf := ref()) is not None]
        if self._weights is None:
            self._weights, self.are_made = alive, len(alive) < len(self._refs)
        elif any(all(leaf is not weight for weight in self._weights) for leaf in alive):
            raise NotByRowsError(WholeReason.KEEPS_LEAF)


class KeptInputs:
    """Finds out in a probe whether a forward keeps a tensor of its input, or a view of one.

    Args:
        given: the leaves of the arguments; their tensors have memory of their own.
    """

    def __init__(self, given: list[Any]) -> None:
        self._given = given
        self._needs = [_is_root(leaf) for leaf in given]
        self._before = self._count()

    def check(self) -> None:
        """Check that the forward has kept none; call this when its outputs are gone.

        Raises:
            NotByRowsError: when it has kept one, or made one a leaf.
        """
        if [_is_root(leaf) for leaf in self._given] != self._needs:
            raise NotByRowsError(WholeReason.INPUT_AS_LEAF)
        if self._count() > self._before:
            gc.collect()  # a cycle may hold it
            if self._count() > self._before:
                raise NotByRowsError(WholeReason.KEEPS_INPUT)

    def _count(self) -> int:
        """Return the number of references to the tensors and to their memory."""
        total = 0
        for leaf in self._given:
            if is_tensor(leaf) and leaf.layout == torch.strided:
                total += sys.getrefcount(leaf) + torch._C._storage_Use_Count(storage_of(leaf)._cdata)
        return total


def find_unread(outputs: Sequence[Any], inside: Sequence[nn.Module]) -> list[Tensor]:
    """Return the leaves of the graph of ``outputs`` whose gradients nobody can read, since only the graph holds them.

    Parameters are left out. With TorchScript among the modules ``inside``, nothing is found: C++ holds its weights.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in inside):
        return []
    found = [leaf for leaf in find_leaves(_with_graph(outputs)) if not isinstance(leaf, nn.Parameter)]
    counts = _count_references(found)
    return [leaf for leaf, count in zip(found, counts, strict=True) if count <= _least_count() and not has_hooks(leaf)]


@functools.cache
def _least_count() -> int:
    """Return what ``_count_references`` returns for a leaf that only a graph holds."""
    with torch.enable_grad():
        output = torch.zeros(1, device="cpu").requires_grad_() * 1
    found = find_leaves([output])
    return _count_references(found)[0]


def _count_references(leaves: list[Tensor]) -> list[int]:
    return [sys.getrefcount(leaf) for leaf in leaves]


def _with_graph(outputs: Sequence[Any]) -> list[Tensor]:
    return [one for one in outputs if _is_root(one)]


# Note [Backwards of programs]
#
# The gradient of torch's operations is the derivative of what they compute: where the forward works row by row, so does
# the backward. Each rank's gradient is multiplied by the number of ranks (see Note [Whole] in row_functions.py), and so
# is the result. A function of the program's own may clamp a gradient, divide it by a norm over the batch, round it, or
# add something to it. So if a forward uses such a function, a probe runs backwards too, from random gradients of the
# outputs. Gradients multiplied or divided by 2**40 (2**8 if a tensor is float16) must give results that are multiplied
# or divided by the same number. The blocks' gradients of parameters must add up to those of the whole batch; their
# gradients of inputs must be the rows of the whole batch's. A hook that a forward sets on a tensor may store the
# gradient that it gets, so a forward that sets one is not split by rows.


# Note [Leaves that a forward makes]
#
# A forward may make its rows a leaf of the graph (`x.requires_grad = True`), as the feature encoders of wav2vec2,
# HuBERT, SEW and data2vec do, or make a leaf for them (`torch.zeros(len(x), requires_grad=True)`). In a sliced
# forward such a leaf has this rank's rows. Its gradient must not be averaged, and the program would find it if it
# kept the leaf. So a probe looks for leaves in the graph of the outputs. A leaf that dies with the graph was made by
# the forward, and nobody can read its gradient: in sliced calls such leaves are found again (`find_unread`), and keep
# their own gradients. A leaf that outlives the graph is a weight of the program if each run has the same object; else
# the forward has made and kept it, and runs whole. So does a forward that gives such a leaf as an output.
#
# A forward that keeps its input, a part of it or a view of it, would keep this rank's rows. References to the tensors
# and their memory are counted before and after a run on copies.
