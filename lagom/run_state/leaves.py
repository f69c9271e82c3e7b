"""Leaves of the autograd graph: finds the leaves that a backward reaches, and numbers leaves equally on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.parameter import is_lazy

from lagom.patching.object_reference import HiddenReference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.autograd.graph import Node

ACCUMULATE = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # not in the stubs


class Leaves:
    """Numbers leaves in the order of their creation, without setting attributes of the tensors.

    Ranks run the same program, so a number means the same leaf on all ranks. A tensor that is not a Parameter gets the
    next number when a backward first reaches it, since lagom does not see its creation.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[HiddenReference[torch.Tensor], int]] = {}
        self._by_number: dict[int, HiddenReference[torch.Tensor]] = {}
        self._next = 0

    def add_leaf(self, leaf: torch.Tensor) -> int:
        """Give ``leaf`` the next number and return it."""
        key, number = id(leaf), self._next

        def forget(_: object) -> None:
            # A callback that comes late must not remove a newer leaf with the same id.
            if (entry := self._by_id.get(key)) is not None and entry[1] == number:
                del self._by_id[key]
            self._by_number.pop(number, None)

        ref = HiddenReference(leaf, forget)
        self._by_id[key] = (ref, number)
        self._by_number[number] = ref
        self._next += 1
        return number

    def number(self, leaf: torch.Tensor) -> int:
        """Return the number of ``leaf``, which gets the next number if it has none."""
        entry = self._by_id.get(id(leaf))
        return entry[1] if entry is not None and entry[0]() is leaf else self.add_leaf(leaf)

    def known(self, leaf: torch.Tensor) -> int | None:
        """Return the number of ``leaf``, or None if it has none."""
        entry = self._by_id.get(id(leaf))
        return entry[1] if entry is not None and entry[0]() is leaf else None

    def parameters(self) -> dict[int, torch.Tensor]:
        """Return all living, trainable Parameters by number."""
        found = {number: self.tensor(number) for number in sorted(self._by_number)}
        return {
            number: leaf
            for number, leaf in found.items()
            if isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad and not is_lazy(leaf)
        }

    def tensor(self, number: int) -> torch.Tensor | None:
        """Return the leaf with this number, or None if it is dead."""
        ref = self._by_number.get(number)
        leaf = ref() if ref is not None else None
        if leaf is not None:
            leaf._fix_weakref()  # type: ignore[attr-defined]  # not in the stubs; see torch.utils.weak.TensorWeakRef
        return leaf

    def state(self) -> tuple[dict[int, torch.Tensor], int]:
        """Return all living leaves by number, and the next number: arguments of ``restore`` in another process."""
        found = {number: self.tensor(number) for number in list(self._by_number)}
        return {number: leaf for number, leaf in found.items() if leaf is not None}, self._next

    def restore(self, known: Mapping[int, torch.Tensor], following: int) -> None:
        """Adopt the numbers of another process: forget all leaves, number ``known``, and go on with ``following``."""
        self._by_id.clear()
        self._by_number.clear()
        for number, leaf in known.items():
            self._next = number
            self.add_leaf(leaf)
        self._next = following

    def alive(self) -> list[torch.Tensor]:
        """Return all numbered leaves that are still alive."""
        found = (self.tensor(number) for number in list(self._by_number))
        return [leaf for leaf in found if leaf is not None]


def find_leaves(
    roots: Sequence[torch.Tensor | GradientEdge], inputs: Iterable[torch.Tensor | GradientEdge] = ()
) -> list[torch.Tensor]:
    """Return the leaves that a backward from ``roots`` accumulates into; with ``inputs``, the leaves in ``inputs``.

    A parameter that several modules share is returned once, however many operations use it. A leaf that the program
    names twice (``inputs=[w, w]``) is returned twice, so callers must tell leaves apart by id. Call this before the
    backward, which frees the graph. It takes 3 microseconds for an MLP, and 0.45 ms for a 24-layer transformer whose
    backward takes 9 ms.
    """
    only = list(inputs)
    leaves: list[torch.Tensor] = []
    pending: list[Node] = []
    for root in only or roots:
        if isinstance(root, GradientEdge):
            pending.append(root.node)
        elif root.grad_fn is not None:
            pending.append(root.grad_fn)
        elif root.requires_grad:
            leaves.append(root)
    if only:
        return leaves + [leaf_of_node(node) for node in pending if type(node) is ACCUMULATE]
    seen = set(pending)
    leaves += [leaf_of_node(node) for node in pending if type(node) is ACCUMULATE]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node) is ACCUMULATE:
                leaves.append(node.variable)  # type: ignore[attr-defined]
            else:
                pending.append(node)
    return leaves


def leaf_of_node(node: Node) -> torch.Tensor:
    """Return the leaf that an AccumulateGrad node accumulates into."""
    leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]  # only AccumulateGrad has it
    return leaf
