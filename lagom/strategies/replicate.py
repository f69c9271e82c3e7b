"""``Replicate``: every rank holds the whole model; the gradients of each backward are averaged over the ranks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.errors import DivergenceError, LagomError
from lagom.strategies.checksum import digest
from lagom.strategies.frame import signature
from lagom.strategies.layout import Bucket, Entry, Layout, travelling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lagom.collectives.group import Group
    from lagom.strategies.divergence import Watch
    from lagom.strategies.frame import Frame
    from lagom.strategies.leaves import Leaves

_MAX_LAYOUTS = 64


class Reached(NamedTuple):
    """The gradients of one backward on this rank, side by side with the numbers of their leaves."""

    numbers: list[int]
    gradients: list[torch.Tensor]


class Replicate:
    """Averages the gradients of the leaves that a backward reached.

    See Note [Which gradients].

    Args:
        leaves: numbers the leaves.
        watch: compares parameters now and then.
        frame: the first exchange of each backward; of size 0 where gradients are on GPUs.
        num_samples: how many samples this rank has of the current batch; None when it has all of them.
        name: what to call a leaf in an error.
    """

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        watch: Watch,
        frame: Frame,
        num_samples: Callable[[], int | None],
        name: Callable[[torch.Tensor | None], str],
    ) -> None:
        self._watch = watch
        self._group = group
        self._leaves = leaves
        self._num_samples = num_samples
        self._name = name
        self._frame = frame
        self._layouts: dict[object, Layout] = {}
        self._verified: set[int] = set()
        self._local: set[int] = set()
        self._inputs: set[int] = set()
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    @torch.no_grad()
    def reduce(self, leaves: Iterable[torch.Tensor]) -> None:
        """Average ``leaf.grad`` over the ranks, in place; a collective unless nothing was reached.

        Raises:
            DivergenceError: on all ranks, when a leaf had other values on other ranks at its first backward, or
                parameters differ since.
            LagomError: when gradients were used before they could be averaged.
        """
        numbers, gradients = [], []
        for leaf in leaves:
            if leaf.grad is not None:
                number = self._leaves.known(leaf)
                if number is None:
                    number = self._number(leaf)
                if number not in self._local:
                    numbers.append(number)
                    gradients.append(_real(leaf.grad))
            elif leaf._post_accumulate_grad_hooks:
                raise LagomError(_IN_BACKWARD)
        if numbers:
            self._watch.step()
            self._average(Reached(numbers, gradients))

    def _number(self, leaf: torch.Tensor) -> int:
        number = self._leaves.created(leaf)
        if leaf.dim() and leaf.shape[0] == self._num_samples():
            self._inputs.add(number)
        return number

    def _average(self, reached: Reached) -> None:
        layout = self._layout(reached)
        framed = [reached.gradients[i] for i in layout.framed]
        if framed:
            torch._foreach_copy_(layout.parcel.mine, framed)
        if not self._frame.average(layout.parcel, self._signature(layout)):
            union = self._union(layout)
            if union.numbers:
                self._average(union)
            return
        if layout.is_new:
            self._verified.update(layout.unseen)
            self._watch.trained(layout.numbers)
            layout.unseen, layout.is_new = [], False
        if framed:
            torch._foreach_copy_(framed, layout.parcel.averages)
        for bucket in layout.buckets:
            self._average_bucket(bucket, reached.gradients)
        for i in layout.sparse:
            self._average_sparse(reached.gradients[i])
        self._watch.agreed()

    def _layout(self, reached: Reached) -> Layout:
        key = tuple(
            (number, gradient.dtype, gradient.shape, gradient.is_sparse, gradient.is_cuda)
            for number, gradient in zip(*reached, strict=True)
        )
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) == _MAX_LAYOUTS:
                self._forget()
            layout = self._layouts[key] = Layout([Entry(*parts) for parts in key], self._frame.room)
            layout.unseen = [number for number in layout.numbers if number not in self._verified]
        return layout

    def _forget(self) -> None:
        self._layouts.clear()
        for numbers in (self._watch.reached, self._local, self._inputs):
            numbers.intersection_update([number for number in numbers if self._leaves.tensor(number) is not None])

    def _signature(self, layout: Layout) -> bytes:
        layout.unseen = [number for number in layout.unseen if number not in self._verified]
        besides = self._watch.identity(layout.numbers, new=layout.is_new)
        if not (layout.unseen or besides):
            return layout.signature
        unseen = [self._leaves.tensor(number) for number in sorted(layout.unseen)]
        return signature(layout.identity + besides + b"".join(digest(leaf) for leaf in unseen if leaf is not None))

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

    def _union(self, layout: Layout) -> Reached:
        """Agree on what any rank reached; what this one did not reach counts as zero and gets the result."""
        self._watch.meet("a backward")
        mine = [(entry, entry.number in self._inputs) for entry in layout.entries]
        rows = [pickle.loads(part) for part in self._group.all_gather_bytes(pickle.dumps(mine))]
        entries: dict[int, list[Entry]] = {}
        inputs: dict[int, list[bool]] = {}
        for row in rows:
            for entry, is_input in row:
                entries.setdefault(entry.number, []).append(entry)
                inputs.setdefault(entry.number, []).append(is_input)
        numbers = sorted(entries)
        world_size = self._group.world_size
        maybe_local = {n for n in numbers if len(inputs[n]) == world_size and all(inputs[n])}
        self._verify([n for n in numbers if n not in self._verified], maybe_local)
        numbers = [n for n in numbers if n not in self._local]
        return Reached(numbers, [self._gradient(n, entries[n]) for n in numbers])

    def _verify(self, numbers: list[int], maybe_local: set[int]) -> None:
        """Compare leaves that are seen for the first time, in the same way on all ranks."""
        if not numbers:
            return
        mine = {}
        for number in numbers:
            leaf = self._leaves.tensor(number)
            mine[number] = None if leaf is None else (tuple(leaf.shape), str(leaf.dtype), digest(leaf))
        theirs = [pickle.loads(part) for part in self._group.all_gather_bytes(pickle.dumps(mine))]
        for number in numbers:
            held = [part[number] for part in theirs]
            if all(one is not None and one == held[0] for one in held):
                self._verified.add(number)
            elif number in maybe_local:
                self._local.add(number)
            else:
                raise DivergenceError(self._difference(number, held))

    def _difference(self, number: int, held: list[tuple[tuple[int, ...], str, bytes] | None]) -> str:
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
            "the time, the process or a generator of your own without a fixed seed"
        )

    def _gradient(self, number: int, entries: list[Entry]) -> torch.Tensor:
        leaf = self._leaves.tensor(number)
        if leaf is None:
            raise DivergenceError(f"a tensor that other ranks train (number {number}) is gone on this rank")
        dense = not all(entry.sparse for entry in entries)
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf) if dense else torch.zeros_like(leaf, layout=torch.sparse_coo)
        elif dense and leaf.grad.is_sparse:
            leaf.grad = leaf.grad.to_dense()
        return _real(leaf.grad)


_IN_BACKWARD = (
    "a hook of the program's (register_post_accumulate_grad_hook) used up a gradient during the backward, before it "
    "was averaged over the ranks; step the optimizer after backward() instead"
)


def _real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() and not gradient.is_sparse else gradient


# Note [Which gradients]
#
# Ranks may reach different leaves: a branch on the data, a mixture of experts. Two experts of one shape must
# never be mixed, so the ranks agree on the set in each backward, at no cost: each gives all others a signature of
# its set and, in the same message, its first gradients. When all signatures are equal, the gradients that came with
# them are added, and the rest follows in buckets. Otherwise nothing has been written back yet; the ranks exchange
# their sets and reduce the union, in the order of the leaves' numbers.
#
# A leaf that is reached for the first time has a checksum of its values in the signature as well: training
# from different initial values would go wrong silently.
#
# What is averaged is all of leaf.grad, so also what was there before the backward: that is equal on all
# ranks. A plain tensor whose rows are this rank's samples and whose values differ between the ranks is data
# (the input of an adversarial attack), and its gradient stays the rank's own.
