"""``DivergenceMonitor``: checks now and then that parameters and buffers are equal on all ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import signature
from lagom.exchange.plain_values import all_gather_values
from lagom.gradients.buffers import BufferSync
from lagom.gradients.checksum import checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from lagom.exchange.agreement_exchange import AgreedExchange
    from lagom.exchange.group import Group
    from lagom.run_state.leaves import Leaves

INTERVAL = 100
"""Largest number of backwards between two checks; the first checks are after 1, 2, 4, 8, ... backwards.

Without backwards, batches are counted instead.
"""

log = logging.getLogger("lagom")


class RankState(NamedTuple):
    """The facts that a rank sends to the others after signatures differed."""

    at: str
    """The rank's place in the program."""
    values: dict[int, tuple[str, int]] | None
    """Kind and checksum of trained parameters, by number; None if no check is due."""
    buffers: dict[Any, tuple[str, int]]
    """Kind and checksum of buffers."""
    changed: list[Any]
    """Buffers that have changed on the rank since they were last copied from rank 0."""


class DivergenceMonitor:
    """Compares parameters and buffers over the ranks. See Note [Divergence].

    Args:
        modules: returns all modules of the program.
        synchronised: a mapping whose keys are the buffers that lagom keeps equal itself (those of BatchNorm).
        name: returns the name of a parameter for an error.
    """

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        modules: Callable[[], Iterable[nn.Module]],
        synchronised: Mapping[Any, None],
        name: Callable[[torch.Tensor | None], str],
    ) -> None:
        self.checksums: Callable[[Mapping[Any, torch.Tensor]], dict[Any, tuple[str, int]]] = checksums
        """Function that computes the checksums of parameters."""
        self.repair: Callable[[Iterable[torch.Tensor]], bool] | None = None
        """Function that makes the given parameters equal on all ranks after a check has found that some differ.

        It returns whether it could.
        """
        self.reached: set[int] = set()
        """Numbers of the leaves whose gradients were averaged in this run."""
        self._differentiated: set[int] = set()
        """Numbers of parameters that the program may update from gradients that were not averaged."""
        self._seen: dict[int, tuple[str, int]] = {}
        self._group = group
        self._leaves = leaves
        self._name = name
        self._buffers = BufferSync(group, leaves, modules, synchronised)
        self._due = False
        self._is_stale = True
        """Whether the buffers of trained modules must be found again."""
        self._num_steps = 0
        self._next_step = 1
        self._num_batches = 0
        self._next_batch = 2
        self._steps_before = 0
        self._last: list[torch.Tensor] = []
        self.error: DivergenceError | None = None
        """The last error, which the program may have caught."""

    @property
    def is_due(self) -> bool:
        """Whether the next exchange compares parameters."""
        return self._due

    @property
    def num_steps(self) -> int:
        """The number of backwards, and of calls of ``torch.autograd.grad``, whose gradients ranks average."""
        return self._num_steps

    def add_trained(self, numbers: Iterable[int]) -> None:
        """Record leaves that a backward reached, and that were equal on all ranks."""
        self.reached.update(numbers)

    def add_differentiated(self, parameters: list[torch.Tensor]) -> None:
        """Record parameters for which the program got gradients that are not averaged."""
        numbers = [self._leaves.known(parameter) for parameter in parameters]
        self._differentiated.update(number for number in numbers if number is not None)
        if numbers:
            self._last = parameters  # keeps them alive for the check at the end of the program

    def count_step(self) -> None:
        """Count a backward or call of ``torch.autograd.grad`` that ranks average; now and then make a check due."""
        self._num_steps += 1
        if self._num_steps >= self._next_step:
            self._next_step += min(self._num_steps, INTERVAL)
            self._due = self._is_stale = True

    def count_batch(self, frame: AgreedExchange) -> None:
        """Count a training batch, on all ranks; check now and then if no backward runs between batches.

        A check is a collective.

        Raises:
            DivergenceError: on all ranks, if a check finds that parameters, buffers or places in the program differ.
        """
        self._num_batches += 1
        if self._num_batches < self._next_batch:
            return
        self._next_batch += min(self._num_batches, INTERVAL)
        quiet, self._steps_before = self._num_steps == self._steps_before, self._num_steps
        if quiet:
            self._track_changes()
            self._check_ranks(frame, "the next batch of a data loader")

    def check_place(self, frame: AgreedExchange, place: str) -> None:
        """Check that all ranks are at ``place``, before an exchange that does not check this itself.

        Raises:
            DivergenceError: on all ranks, if one is elsewhere.
        """
        if not frame.exchange(signature(place.encode())):
            self.find_divergence(place)

    def check_end(self, frame: AgreedExchange) -> None:
        """Check once more at the end of the program, on all ranks.

        If gradients were averaged in the run, a difference is only a warning: a rank may have changed its model after
        training, to store it.

        Raises:
            DivergenceError: if parameters, buffers or places differ in a run without averages; or if the program caught
                an earlier DivergenceError and continued.
        """
        if self.error is not None:
            raise DivergenceError(f"the program caught this error and went on, with wrong numbers: {self.error}")
        try:
            if self._seen:
                self._track_changes()
            self._check_ranks(frame, "the end of the program")
        except DivergenceError as error:
            if not self._num_steps:
                raise
            log.warning("at the end of the program, %s", error)

    def identity(self, numbers: Iterable[int] = (), *, new: bool = False) -> bytes:
        """Return bytes for the signature: the names of changed buffers, and checksums if a check is due; usually empty.

        Args:
            numbers: leaves that this backward reached.
            new: whether no backward before reached exactly these leaves.
        """
        if new or self._is_stale:
            self._buffers.find_buffers(self.reached | self._differentiated | set(numbers))
            self._is_stale = False
        changed = self._buffers.find_changed()
        if not (changed or self._due):
            return b""
        return repr((changed, self._trained_values(), self._buffers.checksums() if self._due else None)).encode()

    def record_agreement(self) -> None:
        """Finish an exchange with equal signatures: broadcast from rank 0 the buffers that have changed."""
        self._due = False
        self._buffers.broadcast_changed()

    def find_divergence(self, at: str) -> None:
        """Compare places, and parameters and buffers if a check is due, after signatures differed; a collective.

        Raises:
            DivergenceError: on all ranks, if compared places, parameters or buffers of BatchNorm differ.
        """
        try:
            self._exchange_states(at)
        except DivergenceError as error:
            self.record_error(error)
            raise

    def record_error(self, error: DivergenceError) -> None:
        """Remember ``error``, which the program may catch, for the check at the end."""
        self.error = error.with_traceback(None)

    def _exchange_states(self, at: str) -> None:
        buffers = self._buffers.checksums(everything=True)
        mine = RankState(at, self._trained_values(), buffers, self._buffers.find_changed())
        rows = [RankState(*row) for row in all_gather_values(self._group, mine)]
        places = [row.at for row in rows]
        if len(set(places)) > 1:
            told = ", ".join(f"rank {rank} at {place}" for rank, place in enumerate(places))
            raise DivergenceError(
                f"the ranks are at different points of the program: {told}; a branch that only some ranks take "
                "(on the data, the loss, the rank) must not contain a backward, a BatchNorm in training or a "
                "data loader; evaluation='replicated' lets a rank evaluate alone, and with batches='whole' all ranks "
                "have the same batches, and the same numbers to branch on"
            )
        if mine.values is not None:
            self._due = False
            self._compare_rows(rows)
        self._buffers.agree([(row.buffers, row.changed) for row in rows], compare=mine.values is not None)

    def _track_changes(self) -> None:
        """Add the parameters that have changed since the last call (say by torch.func's gradients) to those checked."""
        now = self.checksums(self._leaves.parameters())
        self._differentiated.update(number for number in now if self._seen.get(number, now[number]) != now[number])
        self._seen = now

    def _check_ranks(self, frame: AgreedExchange, at: str) -> None:
        self._due = self._is_stale = True
        if frame.exchange(signature(at.encode() + self.identity())):
            self.record_agreement()
        else:
            self.find_divergence(at)

    def _trained_values(self) -> dict[int, tuple[str, int]] | None:
        """Return the checksums of trained parameters that are alive, by number; None if no check is due."""
        return self.checksums(self._trained()) if self._due else None

    def _trained(self) -> dict[int, torch.Tensor]:
        found = {number: self._leaves.tensor(number) for number in sorted(self.reached | self._differentiated)}
        return {number: leaf for number, leaf in found.items() if leaf is not None}

    def _compare_rows(self, rows: list[RankState]) -> None:
        values = [row.values or {} for row in rows]
        for number in sorted(set.intersection(*(set(held) for held in values))):
            if len({held[number] for held in values}) > 1:
                if self.repair is not None and self.repair(self._trained().values()):
                    break
                raise DivergenceError(_describe_difference(self._name(self._leaves.tensor(number))))
        strict = self._buffers.strict
        for key in [key for key in strict if all(key in row.buffers for row in rows)]:
            if len({row.buffers[key] for row in rows}) > 1:
                raise DivergenceError(_describe_difference(f"the buffer {strict[key]}"))


def _describe_difference(name: str) -> str:
    return (
        f"{name} no longer has the same values on all ranks; gradients are averaged in backward() and "
        "torch.autograd.grad, so update parameters from these, not from torch.func.grad, and not from this rank's own "
        "data; and where a number of its own share decides, as a running loss does in ReduceLROnPlateau, use "
        "batches='whole'"
    )


# Note [Divergence]
#
# Ranks drift apart without an error if an update is made from a gradient that is not averaged (torch.func.grad with an
# update by hand), or if an optimizer draws random numbers of its own. Each averaged backward exchanges signatures (see
# Note [Which gradients] in gradient_averager.py). After some backwards, the signature also contains checksums of all
# parameters trained so far. If the signatures are equal, the check is done without an exchange of its own. Otherwise
# the ranks exchange their checksums, and an error on all ranks names the first parameter that differs, unless the
# difference can be repaired (see Note [Replicas] in replicas.py).
#
# The checksum is a sum of bits. It always differs if one element differs, and with a probability of 1 - 2^-64 if many
# do. It may be the same if equal elements stand in another order. When a parameter is trained for the first time, its
# values are hashed instead.
#
# If no backward runs (a program may call only torch.func.grad), batches are counted instead. lagom does not see the
# gradients of torch.func, so the checks of batches include every parameter that has changed since the last of them.
# There is also a check at the end of the program. All ranks must be at the same place of the program for a check. If
# they are not, the signatures differ, and the ranks find out in the same way.
#
# Buffers that lagom synchronises itself (those of BatchNorm) must be equal, like parameters. A program may update other
# buffers from a rank's share of a batch. The update that one process would make from the whole batch is unknown, so
# these buffers follow rank 0: buffers that have changed since the last backward are broadcast when a backward ends (DDP
# does so when a forward begins). Then an evaluation finds equal buffers on all ranks. The versions of tensors show
# which buffers have changed, and the set is part of the signature. An update through .data does not change the version:
# a check finds it, and from then on this buffer is broadcast after every backward.
