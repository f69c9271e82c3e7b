"""``InitialValueCheck``: checks that leaves had equal values on all ranks when they were first trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lagom.errors import DivergenceError
from lagom.exchange.plain_values import all_gather_values
from lagom.gradients.checksum import hash_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from lagom.exchange.group import Group
    from lagom.run_state.leaves import Leaves


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
