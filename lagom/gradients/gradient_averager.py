"""``GradientAverager``: averages the gradients of each backward over the ranks, once they agree on the leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import signature
from lagom.exchange.plain_values import all_gather_values
from lagom.gradients.cached_backward import is_small
from lagom.gradients.checksum import hash_values
from lagom.gradients.overlap import OverlappedBackward
from lagom.gradients.reduction.buckets import Layout, LayoutEntry, Mean
from lagom.gradients.tensor_averager import TensorAverager, real_gradient
from lagom.run_state.leaf_hooks import has_hooks
from lagom.run_state.leaves import Likeness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lagom.exchange.agreement_exchange import AgreedExchange
    from lagom.exchange.group import Group
    from lagom.gradients.backward_gradients import BackwardGradients
    from lagom.gradients.divergence import DivergenceMonitor
    from lagom.gradients.overlap import BucketPipeline
    from lagom.gradients.reduction.buckets import Reduction
    from lagom.gradients.tensor_averager import Compare
    from lagom.run_state.leaves import Leaves

_BACKWARD = "a backward"
_REST = "the end of a backward"
_TAIL = 8
"""Bytes at the end of a signature in which a short text may stand unhashed; the other bytes still identify a layout."""


class ReachedLeaves(NamedTuple):
    """The gradients of one backward on this rank, and the numbers of their leaves in the same order."""

    numbers: list[int]
    gradients: list[torch.Tensor]


class GradientAverager:
    """Averages the gradients of the leaves that a backward reached.

    See Note [Which gradients].

    Args:
        leaves: gives leaves numbers that are equal on all ranks.
        divergence: compares parameters now and then.
        frame: the exchange of signatures; it has no room for gradients if these are on accelerators.
        likeness: returns how closely a leaf resembles data.
        name: returns the name of a leaf for an error.
        reduction: how the gradients of backwards are combined; None for the mean.
    """

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        divergence: DivergenceMonitor,
        frame: AgreedExchange,
        likeness: Callable[[torch.Tensor], Likeness],
        name: Callable[[torch.Tensor | None], str],
        reduction: Reduction | None = None,
    ) -> None:
        self.reduction = reduction or Mean(group)
        self._divergence = divergence
        self._group = group
        self._leaves = leaves
        self._likeness = likeness
        self._verified = InitialValueCheck(group, leaves, name)
        self._averager = TensorAverager(group, frame, self._forget_dead_leaves, self.reduction)
        self.overlap = OverlappedBackward(group, leaves, divergence, frame, allowed=self.reduction.overlaps)
        self._inputs: set[int] = set()
        """Numbers of leaves with a row for each of this rank's samples: data, if their values differ between ranks."""
        self.agreed_layout: Layout | None = None
        """Layout of the last reduction, if the ranks agreed on it at once."""

    def begin_backward(self, pending: BackwardGradients) -> None:
        """Prepare the overlap of the backward that is about to run; its large gradients may then travel meanwhile.

        A collective if ``OverlappedBackward.begin`` is one.

        Raises:
            DivergenceError: on all ranks, if they are at different places of the program, or parameters differ.
        """
        known = [(self._leaves.known(leaf), leaf) for leaf in pending.leaves]
        averaged = [(-1 if n is None else n, leaf) for n, leaf in known if n not in self._verified.local]
        plain = [leaf for leaf in pending.without_gradient if not has_hooks(leaf)]
        self.overlap.begin([n for n, _ in averaged], [leaf for _, leaf in averaged], plain)

    @torch.no_grad()
    def average_backward(
        self, pending: BackwardGradients, *, is_counted: bool = False, differs: bool = False, compares: bool = False
    ) -> None:
        """Combine ``leaf.grad`` over the ranks by the run's reduction; a collective unless there is nothing to combine.

        Args:
            is_counted: whether the divergence monitor has counted this backward.
            differs: whether ``reduce_cached`` has just found that the ranks do not agree.
            compares: whether small gradients may be compared first, and left as they are if all ranks have the same.

        Raises:
            DivergenceError: on all ranks, if they are at different places, a leaf had different values at its first
                backward, or parameters have become different since; on this rank, if a leaf of other ranks is gone.
            LagomError: on all ranks, if the reduction is Adasum and a gradient is sparse.
        """
        self.agreed_layout = None
        running = self.overlap.end()
        reached = ReachedLeaves([], [])
        for leaf in pending.leaves:
            if leaf.grad is not None and not (running is not None and running.contains(leaf)):
                number = self._leaves.known(leaf)
                if number is None:
                    number = self._number_leaf(leaf)
                if number not in self._verified.local:
                    reached.numbers.append(number)
                    reached.gradients.append(real_gradient(leaf))
        if not is_counted and (running is not None or reached.numbers):
            self._divergence.count_step()
        if running is not None:
            self._reduce_rest(reached, running, pending)
        elif reached.numbers:
            kind, tries = _describe_place(_BACKWARD, pending), 0
            while reached.numbers and (
                differs or not self.reduce_if_agreed(kind, reached, pending.identity, compares=compares and not tries)
            ):
                reached, differs, tries = self._agree_on_union(kind, reached, pending), False, tries + 1
            if reached.numbers:
                pending.record_agreement()
                layout = self._averager.find_layout(kind, *reached)
                self.overlap.record_layout(layout)
                self.agreed_layout = layout if not tries else None

    def reduce_cached(self, layout: Layout, gradients: Sequence[torch.Tensor], identity: bytes) -> bool:
        """Average with the layout of an earlier reduction, which is faster than ``average_backward``; a collective.

        Args:
            gradients: dense, contiguous gradients in the order of ``layout``; averaged in place.
            identity: bytes that must be equal on all ranks.

        Returns:
            False if the ranks did not agree; then ``average_backward(..., differs=True)`` must follow.
        """
        signed = self._make_signature(layout, identity)
        if not self._averager.average(layout, gradients, signed, compares=True, are_plain=True):
            return False
        self._divergence.record_agreement()
        return True

    def _reduce_rest(self, reached: ReachedLeaves, running: BucketPipeline, pending: BackwardGradients) -> None:
        """Average the gradients that did not travel during an overlapped backward, and wait for those that did."""
        missing = sorted(self._leaves.number(leaf) for leaf in running.missing)
        kind = _describe_place(_REST, pending)
        while not self.reduce_if_agreed(kind, reached, pending.identity + (repr(missing).encode() if missing else b"")):
            reached = self._agree_on_union(kind, reached, pending)
            everywhere = map(set, all_gather_values(self._group, missing))
            missing = sorted(set.intersection(*everywhere))
        pending.record_agreement()
        running.wait_for_all({id(leaf) for leaf in running.missing if self._leaves.known(leaf) in missing})

    def reduce_if_agreed(
        self, kind: str, reached: ReachedLeaves, identity: bytes, *, by_mean: bool = False, compares: bool = False
    ) -> bool:
        """Reduce gradients in place, if all ranks are at the same ``kind`` of exchange and reached the same leaves.

        Args:
            identity: further bytes that must be equal on all ranks.
            by_mean: whether to use the mean, and not the run's reduction.
            compares: as in ``average_backward``.

        Returns:
            Whether the ranks agreed; if not, nothing has changed.
        """
        layout = self._averager.find_layout(kind, *reached, by_mean=by_mean)
        if layout.is_new:
            layout.unseen = self._verified.find_unseen(layout.numbers)
        signed = self._make_signature(layout, identity)
        if not self._averager.average(layout, reached.gradients, signed, compares=compares and is_small(layout)):
            return False
        if layout.is_new:
            self._verified.add_verified(layout.unseen)
            self._divergence.add_trained(number for number in layout.numbers if number >= 0)
            layout.unseen, layout.is_new = [], False
        self._divergence.record_agreement()
        return True

    def set_comparison(self, compare: Compare) -> None:
        """Use ``compare`` to find out whether gradients need no average."""
        self._averager.compare = compare

    def set_digest(self, digest: Callable[[torch.Tensor], bytes]) -> None:
        """Use ``digest`` to hash the values of leaves that are reached for the first time."""
        self._verified.digest = digest

    def keeps_own(self, leaf: torch.Tensor) -> bool:
        """Return whether ``leaf`` was found to be data, whose gradient is not averaged."""
        return self._leaves.known(leaf) in self._verified.local

    def verify_initial_values(self, numbers: Iterable[int]) -> None:
        """Check that leaves are equal on all ranks; a collective if some have not been compared before.

        Raises:
            DivergenceError: on all ranks, if one differs.
        """
        self._verified.verify(self._verified.find_unseen(numbers), set())

    def _number_leaf(self, leaf: torch.Tensor) -> int:
        number = self._leaves.add_leaf(leaf)
        likeness = self._likeness(leaf)
        if likeness is Likeness.ROWS:
            self._inputs.add(number)
        elif likeness is Likeness.SHAPE:
            self._verified.local.add(number)
        return number

    def _forget_dead_leaves(self) -> None:
        for numbers in (self._divergence.reached, self._verified.local, self._inputs):
            numbers.intersection_update([number for number in numbers if self._leaves.tensor(number) is not None])

    def _make_signature(self, layout: Layout, identity: bytes) -> bytes:
        if layout.unseen:
            layout.unseen = self._verified.find_unseen(layout.unseen)
        identity += self._divergence.identity(layout.numbers, new=layout.is_new)
        if not (layout.unseen or identity):
            return layout.signature
        if not layout.unseen and len(identity) <= _TAIL:  # usually the number of the batch; hashing takes longer
            return layout.signature[:-_TAIL] + identity.ljust(_TAIL)
        digest = self._verified.digest
        unseen = [self._leaves.tensor(number) for number in sorted(layout.unseen)]
        return signature(layout.signature + identity + b"".join(digest(leaf) for leaf in unseen if leaf is not None))

    def _agree_on_union(self, kind: str, reached: ReachedLeaves, pending: BackwardGradients) -> ReachedLeaves:
        """Return the leaves that any rank reached, with zeros for those that this rank did not reach; a collective.

        Leaves that are found to be data are left out.
        """
        self._divergence.find_divergence(kind + _describe_batches(pending.batches))
        layout = self._averager.find_layout(kind, *reached)
        mine = pending.habits, [(entry, entry.number in self._inputs) for entry in layout.entries]
        parts = all_gather_values(self._group, mine)
        rows = [[(LayoutEntry(*entry), is_input) for entry, is_input in row] for _, row in parts]
        if len({habits for habits, _ in parts}) > 1:
            pending.record_disagreement()
        entries: dict[int, list[LayoutEntry]] = {}
        inputs: dict[int, list[bool]] = {}
        for row in rows:
            for entry, is_input in row:
                entries.setdefault(entry.number, []).append(entry)
                inputs.setdefault(entry.number, []).append(is_input)
        numbers = sorted(entries)
        world_size = self._group.world_size
        maybe_local = {n for n in numbers if len(inputs[n]) == world_size and all(inputs[n])}
        self._verified.verify(self._verified.find_unseen(numbers), maybe_local)
        numbers = [n for n in numbers if n not in self._verified.local]
        return ReachedLeaves(numbers, [self._gradient_or_zeros(n, entries[n], pending) for n in numbers])

    def _gradient_or_zeros(self, number: int, entries: list[LayoutEntry], pending: BackwardGradients) -> torch.Tensor:
        leaf = self._leaves.tensor(number)
        if leaf is None:
            raise DivergenceError(f"a tensor that other ranks train (number {number}) is gone on this rank")
        pending.expect([leaf])
        dense = not all(entry.sparse for entry in entries)
        if leaf.grad is None:
            leaf.grad = _make_zeros(leaf, dense=dense)
        elif dense and leaf.grad.is_sparse:
            leaf.grad = leaf.grad.to_dense()
        return real_gradient(leaf)


def _make_zeros(leaf: torch.Tensor, *, dense: bool) -> torch.Tensor:
    if leaf.is_mkldnn:
        return torch.zeros(leaf.shape, dtype=leaf.dtype).to_mkldnn()
    return torch.zeros_like(leaf) if dense else torch.zeros_like(leaf, layout=torch.sparse_coo)


def _describe_place(kind: str, pending: BackwardGradients) -> str:
    number = pending.num_backwards
    if number > 1:
        kind += f", the {number}. one since gradients were used"
    return f"{kind} after {pending.num_failed} that failed" if pending.num_failed else kind


def _describe_batches(batches: Sequence[int | None]) -> str:
    known = [str(batch) for batch in batches if batch is not None]
    return f" on batch {', '.join(known)} of a pass" if known else ""


# Note [Which gradients]
#
# Ranks may reach different leaves, for example after a branch on the data or in a mixture of experts. The gradients of
# two experts with equal shapes must never be mixed. So in each backward the ranks agree on the set of leaves, without
# an additional exchange: each rank sends a signature of its set and, in the same message, its small gradients. If all
# signatures are equal, these gradients are added, and the large ones follow in buckets. Otherwise no gradient has been
# changed yet: the ranks exchange their sets and reduce the union, in the order of the leaves' numbers. (Large gradients
# may be sent during a backward, after an exchange at its start: see Note [Overlap] in overlap.py.)
#
# When a leaf is reached for the first time, the signature also contains a hash of its values, since training from
# different initial values would give wrong results without an error.
#
# Only the gradients that one backward adds (or several: see Note [Accumulation] in accumulation.py) are averaged; see
# Note [Hooks of leaves] in backward_gradients.py. A leaf that is no Parameter is data (such as the input of an
# adversarial attack) if it has a row for each of this rank's samples, and its values differ between ranks. Its gradient
# stays this rank's own. So does the gradient of such a leaf with the exact shape of a tensor of the batch, such as a
# perturbation, which begins as zeros on all ranks, unless it is found to be a weight: see Note [Plain leaves] in
# run_state/leaves.py.


class InitialValueCheck:
    """Compares the values of leaves that a backward reaches for the first time.

    Args:
        name: returns the name of a leaf for an error.
    """

    def __init__(self, group: Group, leaves: Leaves, name: Callable[[torch.Tensor | None], str]) -> None:
        self.digest: Callable[[torch.Tensor], bytes] = hash_values
        """Function that returns a hash of a leaf's values."""
        self.local: set[int] = set()
        """Numbers of leaves that are data, by their shape or since they differ; their gradients are not averaged."""
        self._group = group
        self._leaves = leaves
        self._name = name
        self._equal: set[int] = set()

    def find_unseen(self, numbers: Iterable[int]) -> list[int]:
        """Return the ``numbers`` of leaves that have not been compared; negative numbers do not belong to leaves."""
        return [number for number in numbers if number >= 0 and number not in self._equal]

    def add_verified(self, numbers: Iterable[int]) -> None:
        """Record leaves that are equal on all ranks."""
        self._equal.update(numbers)

    def verify(self, numbers: list[int], maybe_local: set[int]) -> None:
        """Compare leaves; a collective, unless ``numbers`` is empty. All ranks pass equal arguments.

        Args:
            maybe_local: leaves that may be data; if these differ they become ``local``.

        Raises:
            DivergenceError: on all ranks, if another leaf differs, or does not exist on a rank.
        """
        if not numbers:
            return
        mine = {}
        for number in numbers:
            leaf = self._leaves.tensor(number)
            mine[number] = None if leaf is None else (tuple(leaf.shape), str(leaf.dtype), self.digest(leaf))
        theirs = all_gather_values(self._group, mine)
        for number in numbers:
            held = [part[number] for part in theirs]
            if all(one is not None and one == held[0] for one in held):
                self._equal.add(number)
            elif number in maybe_local:
                self.local.add(number)
            else:
                raise DivergenceError(self._describe_difference(number, held))

    def _describe_difference(self, number: int, held: list[tuple[tuple[int, ...], str, bytes] | None]) -> str:
        name = self._name(self._leaves.tensor(number))
        if missing := [rank for rank, one in enumerate(held) if one is None]:
            return (
                f"{name} is trained on some ranks but does not exist on rank {missing[0]}; create the same "
                "parameters, in the same order, on every rank (torch.nn.Parameter, not a plain tensor, for "
                "what only some ranks reach)"
            )
        if len({one[:2] for one in held if one}) > 1:
            shapes = ", ".join(str(one[0]) for one in held if one)
            return (
                f"{name} has other shapes or types on other ranks ({shapes}); create the same parameters, in the "
                "same order, on every rank"
            )
        return (
            f"{name} had different values on different ranks when it was first trained; draw initial values from "
            "torch's, numpy's or random's global generators, which lagom starts equal on all ranks, and not from "
            "the time, the process, uninitialised memory (torch.empty) or a generator of your own without a fixed "
            "seed; and make the same parameters on all ranks, which are told apart by the order in which they were made"
        )
