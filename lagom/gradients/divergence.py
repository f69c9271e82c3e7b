"""``DivergenceMonitor``: finds out, now and then, whether what must be equal on all ranks is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagom.collectives.agreement_exchange import signature
from lagom.collectives.plain_values import all_gather_values
from lagom.errors import DivergenceError
from lagom.gradients.buffers import BufferSync
from lagom.gradients.checksum import checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from lagom.collectives.agreement_exchange import AgreedExchange
    from lagom.collectives.group import Group
    from lagom.run_state.leaves import Leaves

INTERVAL = 100
"""Backwards from check to check, in the long run; the first checks are after 1, 2, 4, 8, ... of them."""

log = logging.getLogger("lagom")


class Row(NamedTuple):
    """What a rank tells the others once they disagree."""

    at: str
    """Where it is in the program."""
    values: dict[int, tuple[str, int]] | None
    """Kind and checksum of trained parameters by their numbers, when a check is due."""
    buffers: dict[Any, tuple[str, int]]
    """The same of buffers."""
    changed: list[Any]
    """Buffers that its forwards changed."""


class DivergenceMonitor:
    """Compares parameters and buffers over the ranks. See Note [Divergence].

    Args:
        modules: all there are.
        synchronised: a mapping that has the buffers that lagom itself keeps equal.
        name: what to call a parameter in an error.
    """

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        modules: Callable[[], Iterable[nn.Module]],
        synchronised: Mapping[Any, None],
        name: Callable[[torch.Tensor | None], str],
    ) -> None:
        self.sums: Callable[[Mapping[Any, torch.Tensor]], dict[Any, tuple[str, int]]] = checksums
        """Of parameters."""
        self.reached: set[int] = set()
        """Numbers of the leaves that some backward of this run reached."""
        self._differentiated: set[int] = set()
        self._seen: dict[int, tuple[str, int]] = {}
        self._group = group
        self._leaves = leaves
        self._name = name
        self._buffers = BufferSync(group, leaves, modules, synchronised)
        self._due = False
        self._is_stale = True
        self._num_steps = 0
        self._next_step = 1
        self._num_batches = 0
        self._next_batch = 2
        self._steps_before = 0
        self._last: list[torch.Tensor] = []
        self._told: DivergenceError | None = None

    def trained(self, numbers: Iterable[int]) -> None:
        """A backward reached these, and their values were equal on all ranks."""
        self.reached.update(numbers)

    def differentiated(self, parameters: list[torch.Tensor]) -> None:
        """A program got gradients of these that are this rank's own."""
        numbers = [self._leaves.known(parameter) for parameter in parameters]
        self._differentiated.update(number for number in numbers if number is not None)
        if numbers:
            self._last = parameters  # else they might be gone when the program has ended

    def step(self) -> None:
        """A backward is about to be averaged; on all ranks, since that is a collective."""
        self._num_steps += 1
        if self._num_steps >= self._next_step:
            self._next_step += min(self._num_steps, INTERVAL)
            self._due = self._is_stale = True

    def batch(self, frame: AgreedExchange) -> None:
        """The program gets a training batch, on all ranks. Checks where batches come and go without a backward."""
        self._num_batches += 1
        if self._num_batches < self._next_batch:
            return
        self._next_batch += min(self._num_batches, INTERVAL)
        quiet, self._steps_before = self._num_steps == self._steps_before, self._num_steps
        if quiet:
            self._changed()
            self._check(frame, "the next batch of a data loader")

    def at(self, frame: AgreedExchange, place: str) -> None:
        """Make sure that all ranks are at ``place``, before an exchange there that could not tell.

        Raises:
            DivergenceError: on all ranks, unless they are.
        """
        if not frame.exchange(signature(place.encode())):
            self.meet(place)

    def end(self, frame: AgreedExchange) -> None:
        """The program has ended, on all ranks.

        Raises:
            DivergenceError: unless gradients were averaged. Then it is a warning: one rank may have changed its
                model afterwards, to store it. Also when one was raised before, and the program caught it as any
                RuntimeError and went on.
        """
        if self._told is not None:
            raise DivergenceError(f"the program caught this error and went on, with wrong numbers: {self._told}")
        try:
            if self._seen:
                self._changed()
            self._check(frame, "the end of the program")
        except DivergenceError as error:
            if not self._num_steps:
                raise
            log.warning("at the end of the program, %s", error)

    def identity(self, numbers: Iterable[int] = (), *, new: bool = False) -> bytes:
        """What the signature of an exchange has to tell besides; nothing as a rule.

        Args:
            numbers: what this backward reached.
            new: never before in this combination.
        """
        if new or self._is_stale:
            self._buffers.find(self.reached | self._differentiated | set(numbers))
            self._is_stale = False
        changed = self._buffers.changed()
        if not (changed or self._due):
            return b""
        return repr((changed, self._values(), self._buffers.values() if self._due else None)).encode()

    def agreed(self) -> None:
        """All ranks had the same signature: buffers that forwards changed become rank 0's."""
        self._due = False
        self._buffers.follow()

    def meet(self, at: str) -> None:
        """Ranks disagree: find out whether in what must be equal.

        Raises:
            DivergenceError: if so, on all ranks.
        """
        try:
            self._meet(at)
        except DivergenceError as error:
            self.told(error)
            raise

    def told(self, error: DivergenceError) -> None:
        """The program is about to see ``error``, and may catch it."""
        self._told = error.with_traceback(None)

    def _meet(self, at: str) -> None:
        buffers = self._buffers.values(everything=True)
        mine = Row(at, self._values(), buffers, self._buffers.changed())
        rows = [Row(*row) for row in all_gather_values(self._group, mine)]
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
            self._compare(rows)
        self._buffers.agree([(row.buffers, row.changed) for row in rows], compare=mine.values is not None)

    def _changed(self) -> None:
        """Watch parameters that change although no backward reaches them, as with gradients that torch.func gives."""
        now = self.sums(self._leaves.parameters())
        self._differentiated.update(number for number in now if self._seen.get(number, now[number]) != now[number])
        self._seen = now

    def _check(self, frame: AgreedExchange, at: str) -> None:
        self._due = self._is_stale = True
        if frame.exchange(signature(at.encode() + self.identity())):
            self.agreed()
        else:
            self.meet(at)

    def _values(self) -> dict[int, tuple[str, int]] | None:
        """By number, of what is trained and alive."""
        if not self._due:
            return None
        found = {}
        for number in sorted(self.reached | self._differentiated):
            leaf = self._leaves.tensor(number)
            if leaf is not None:
                found[number] = leaf
        return self.sums(found)

    def _compare(self, rows: list[Row]) -> None:
        values = [row.values or {} for row in rows]
        for number in sorted(set.intersection(*(set(held) for held in values))):
            if len({held[number] for held in values}) > 1:
                raise DivergenceError(_difference(self._name(self._leaves.tensor(number))))
        strict = self._buffers.strict
        for key in [key for key in strict if all(key in row.buffers for row in rows)]:
            if len({row.buffers[key] for row in rows}) > 1:
                raise DivergenceError(_difference(f"the buffer {strict[key]}"))


def _difference(name: str) -> str:
    return (
        f"{name} no longer has the same values on all ranks; gradients are averaged in backward() and "
        "torch.autograd.grad, so update parameters from these, not from torch.func.grad, and not from this rank's own "
        "data; and where a number of its own share decides, as a running loss does in ReduceLROnPlateau, use "
        "batches='whole'"
    )


# Note [Divergence]
#
# A gradient that escapes synchronisation makes the ranks drift apart, silently: torch.func.grad with an
# update by hand, an optimizer that draws random numbers of its own. So every so many backwards the signature of
# the exchange that every backward makes (see Note [Which gradients]) tells checksums of all parameters trained so
# far as well. Where they agree that is all, and no exchange was made for it. Otherwise the ranks tell each other
# everything, and the first parameter that differs is named in an error on all of them.
#
# Sums of bits are told apart with certainty when one element differs, and but for chance (2^-64) when many do;
# not when the same elements stand in another order. The first time a parameter is trained it is hashed.
#
# Where no backward runs (a program that only ever calls torch.func.grad), batches are counted instead, and
# the end of the program is a check. Gradients of torch.func are not seen at all, so that then parameters are
# watched that change from one such check to the next. For all of this ranks must be at the same point; where they
# are not, the signatures differ, and that is found out in the same way.
#
# Buffers that lagom synchronises itself (BatchNorm's) must be equal like parameters. Others may be updated from
# a rank's share of a batch. What one machine would make of the whole batch is unknown, so they follow rank 0: those
# that changed since the last backward are broadcast when it ends, like in DDP, whose forwards begin with it. An
# evaluation then finds the same buffers on all ranks. What changed is told by tensors' versions, and its set is in
# the signature too. An update through .data leaves the version: a check finds it, and from then on that buffer is
# broadcast after every backward.
