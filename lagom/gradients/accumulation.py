"""``Accumulation``: backwards whose gradients nobody looks at in between are averaged together, once."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lagom.errors import LagomError
from lagom.gradients.backward_gradients import BackwardGradients
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lagom.gradients.replicate import Replicate
    from lagom.session.session import Session

_MAX_VAIN = 8
"""Cycles in a row that have nothing to save, after which reads of ``grad`` are left alone for good."""


class Accumulation:
    """Knows from how many backwards a program accumulates before it uses gradients. See Note [Accumulation].

    A cycle begins with a backward that finds no gradient anywhere, and ends when the program reads one.
    """

    def __init__(self, session: Session, replicate: Replicate) -> None:
        self._session = session
        self._replicate = replicate
        self._patches = ExitStack()
        self._watches = False
        self._over = False
        """Whether nothing is kept any more."""
        self._is_busy = False
        """Whether gradients are read by lagom and not by the program."""
        self._runs = False
        """Whether autograd is at work."""
        self._count = 0
        """Backwards of this cycle."""
        self._goal = 0
        """How many it will have, it seems."""
        self._lengths: deque[int] = deque([1, 1], maxlen=2)
        self._agreed: tuple[int, ...] = (1, 1)
        """The lengths of two cycles that all ranks have seen alike."""
        self._num_vain = 0
        self._num_failed = 0
        self._batches: list[int | None] = []
        """Of the backwards that are kept, which batch each is on."""
        self._owed: dict[int, nn.Parameter] = {}
        """What holds this rank's own sum, by id."""

    def keeps(self, leaves: Sequence[Tensor], *, create_graph: bool) -> bool:
        """A backward is about to reach ``leaves``: whether their gradients stay the rank's own for now.

        A collective if they cannot, and those of others had.
        """
        with self.busy():
            if self._over or not self._watches:
                if not self._over and any(leaf.grad is not None for leaf in leaves):
                    self._watch()
                self.flush()
                return False
            fits = not create_graph and all(self._fits(leaf) for leaf in leaves)
            if self._count == 0:
                if not (fits and self._starts()):
                    self._in_vain()
                    return False
                self._goal = max(self._agreed)
            elif not fits:
                self.flush()
                self._goal = 0
            self._count += 1
            keeps = self._count < self._goal and (self._count == 1 or bool(self._owed))
            if keeps:
                self._batches.append(self._session.position)
            return keeps

    @property
    def is_idle(self) -> bool:
        """Whether a backward that finds no gradients is one like any other."""
        return not (self._watches or self._owed or self._batches or self._num_failed)

    def keep(self, leaves: Iterable[Tensor]) -> None:
        """A backward adds to ``leaves``, and on this rank only."""
        self._owed.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, nn.Parameter))

    def keep_inside(self, leaves: Iterable[Tensor]) -> None:
        """A backward inside one that keeps its gradients adds to ``leaves``."""
        self.keep(leaves)
        self._over = True  # those of the next one could not be known beforehand either

    def pending(self, *, runs: bool = True) -> BackwardGradients:
        """What the next reduction begins with: the sums that are owed, which then are no more.

        Args:
            runs: a backward will, with whose gradients they are reduced.
        """
        pending = BackwardGradients(list(self._owed.values()), self._count if self._owed else 1)
        if self._watches and not self._over:
            pending.habits = repr(tuple(self._lengths)).encode()
        self._owed = {}
        pending.batches = [*self._batches, self._session.position] if runs else self._batches
        self._batches = []
        pending.num_failed, self._num_failed = self._num_failed, 0
        return pending

    def failed(self, number: int = 1) -> None:
        """So many backwards have; what is exchanged next will say so."""
        self._num_failed += number

    def reduced(self, pending: BackwardGradients) -> None:
        """``pending`` was."""
        if pending.accord:
            self._agreed = tuple(self._lengths)
        self._over = self._over or pending.accord is False
        self._close_if_over()

    def flush(self) -> None:
        """Average what is owed; a collective, if anything is."""
        if self._owed:
            with self.busy():
                pending = self.pending(runs=False)
                pending.ran()
                self._replicate.reduce(pending)
                self.reduced(pending)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While lagom reads gradients."""
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """While autograd runs, and the program only in its hooks."""
        before, self._is_busy, self._runs = self._is_busy, False, True
        try:
            yield
        finally:
            self._is_busy, self._runs = before, False

    def close(self) -> None:
        """Gradients are torch's again."""
        self._over, self._watches = True, False
        self._patches.close()

    def _fits(self, leaf: Tensor) -> bool:
        return (
            isinstance(leaf, nn.Parameter)
            and not leaf._backward_hooks
            and not leaf._post_accumulate_grad_hooks
            and (leaf.grad is None or id(leaf) in self._owed)
        )

    def _starts(self) -> bool:
        # Of all Parameters, not of those reached: the answer must be the same on all ranks.
        return all(self._fits(leaf) for leaf in self._session.leaves.parameters().values())

    def _in_vain(self) -> None:
        self._num_vain += 1
        self._over = self._over or self._num_vain > _MAX_VAIN
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._over and not self._owed:
            self.close()

    def _read(self) -> None:
        """The program is about to use gradients."""
        if self._runs:
            self._over = True  # in a hook, which wants to see what there is now
            return
        if not self._session.may_meet:
            if self._owed:
                raise LagomError(
                    "the gradient of a parameter is read in another thread or process than the one that trains, while "
                    "those of several backwards are being accumulated; read it in the thread that trains"
                )
            return
        self.flush()
        length, self._count = self._count, 0
        self._lengths.append(length)
        if length == 1:
            self._in_vain()
        else:
            self._num_vain = 0

    def _watch(self) -> None:
        if _is_compiled():
            self._over = True  # compiled code need not ask for gradients by their name
            return
        self._watches = True
        for name in ("grad", "_grad"):
            self._patches.enter_context(replaced(Tensor, name, self._property(vars(torch._C.TensorBase)[name])))
        from torch._dynamo.callback import callback_handler  # slow to import

        callback_handler.register_start_callback(self._compiles)
        self._patches.callback(callback_handler.remove_start_callback, self._compiles)

    def _compiles(self, _: object) -> None:
        if self._session.may_meet:
            self.flush()
            self._over = True

    def _property(self, original: Any) -> property:
        overlap = self._replicate.overlap

        def is_used(tensor: Tensor) -> bool:
            return not (self._is_busy or overlap.is_launching) and isinstance(tensor, nn.Parameter)

        def read(tensor: Tensor) -> Tensor | None:
            if self._count and is_used(tensor):
                self._read()
            found: Tensor | None = original.__get__(tensor)
            return found

        def write(tensor: Tensor, value: Tensor | None) -> None:
            if id(tensor) in self._owed and is_used(tensor):
                if value is None:
                    self._drop(tensor)
                else:
                    self._read()
            original.__set__(tensor, value)

        def delete(tensor: Tensor) -> None:
            if id(tensor) in self._owed and is_used(tensor):
                self._drop(tensor)
            original.__delete__(tensor)

        return property(read, write, delete, original.__doc__)

    def _drop(self, leaf: Tensor) -> None:
        """The program throws the gradient away."""
        del self._owed[id(leaf)]
        if not self._owed:
            self._count = 0


def _is_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    compiled = dynamo is not None and dynamo.FRAME_COUNTER > 0
    return compiled or bool(torch.jit._state._python_cu.get_functions())  # type: ignore[func-returns-value]


# Note [Accumulation]
#
# A program that accumulates calls backward several times before it uses gradients. Only their sum is wanted, and the
# average of sums is the sum of averages, so one reduction is enough. When a backward returns, though, nothing tells
# whether the program will use its gradients next. Two things are needed: to notice that it does, and to foresee that
# it will not.
#
# It does by the attribute `grad`, which is made a property, once a backward has added to a gradient. One that nobody
# has read since it was made is known to no one under another name, which is why a cycle begins only where no Parameter
# has any; not, then, after zero_grad(set_to_none=False). Code that is compiled, or run by TorchScript, gets at
# gradients without asking for the attribute: where there is any, nothing is kept. Hooks of Parameters want the gradient
# of each backward: where there are any, nothing is kept either.
#
# What will happen is what has happened: a cycle is taken to have as many backwards as the longer of the two before it.
# The last of them averages while it runs, as any other backward. Where the program reads earlier, the sums are averaged
# when it does. Where it reads later, what follows is averaged one by one and added.
#
# All ranks must decide alike. So what they decide by is the same wherever they go the same way: the numbers of
# backwards between reads and what all Parameters have, not what this rank's batch has reached. Each reduction has in
# its signature for how many backwards it stands and what the rank has learnt of the program; only what all have agreed
# on counts, and once they did not, as when a rank looked at gradients because its own loss was large, nothing is kept.
