"""``Accumulation``: averages the gradients of several backwards at once, if the program reads none in between."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lagom.errors import LagomError
from lagom.gradients.backward_gradients import BackwardGradients
from lagom.patching.dynamo import at_compilation, num_compilations
from lagom.patching.replace import replaced
from lagom.run_state.leaf_hooks import has_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lagom.gradients.gradient_averager import GradientAverager
    from lagom.session.session import Session

_MAX_VAIN = 8
"""After more than this many cycles in a row that saved no reduction, average each backward at once for good.

Such a cycle has a single backward, or begins with a backward that cannot be postponed.
"""


class Accumulation:
    """Predicts how many backwards a program accumulates before it uses gradients. See Note [Accumulation].

    A cycle begins with a backward before which no parameter has a gradient. It ends when the program reads or replaces
    a gradient. A backward of the cycle that is not averaged yet is *postponed*, and its gradients are *postponed sums*.
    """

    def __init__(self, session: Session, gradient_averager: GradientAverager) -> None:
        self._session = session
        self._gradient_averager = gradient_averager
        self._patches = ExitStack()
        self._is_patched = False
        self._over = False
        """Whether each backward is averaged at once from now on."""
        self._is_busy = False
        """Whether lagom itself reads gradients now, and not the program."""
        self._runs = False
        """Whether a backward runs now, so that a read of a gradient comes from a hook."""
        self._count = 0
        """Backwards of this cycle so far."""
        self._goal = 0
        """Predicted number of backwards in this cycle; 0 if no further backward of this cycle is postponed."""
        self._lengths: deque[int] = deque([1, 1], maxlen=2)
        self._agreed: tuple[int, ...] = (1, 1)
        """The last two cycle lengths, as they were when all ranks last agreed on both."""
        self._num_vain = 0
        self._num_failed = 0
        self._batches: list[int | None] = []
        """For each postponed backward, the number of its batch in the pass over the loader; None if unknown."""
        self._owed: dict[int, Tensor] = {}
        """Leaves with postponed sums: their gradients are this rank's own, and still to be averaged. By id."""

    def state(self) -> Any:
        """Return the facts about the program's cycles, for ``restore`` in another process.

        Raises:
            LagomError: if gradients are this rank's own now.
        """
        if self._owed:
            raise LagomError("gradients of several backwards are being accumulated, and are averaged together")
        return self._is_patched, self._over, self._count, self._goal, self._lengths.copy(), self._agreed, self._num_vain

    def restore(self, state: Any) -> None:
        """Go on from the facts that ``state`` has returned, with gradients that are averages."""
        is_patched, self._over, self._count, self._goal, self._lengths, self._agreed, self._num_vain = state
        if is_patched:
            self._patch_grad()
        self._close_if_over()

    def begin_backward(self, leaves: Sequence[Tensor], *, create_graph: bool) -> bool:
        """Return whether to postpone the averaging of the backward that is about to reach ``leaves``.

        If the backward does not fit into the cycle, average the postponed sums first: then this is a collective. If the
        backward is the last one of its cycle, the sums stay, for ``take_pending``.
        """
        with self.mark_busy():
            if self._over or not self._is_patched:
                if not self._over and any(leaf.grad is not None for leaf in leaves):
                    self._patch_grad()
                self.flush()
                return False
            fits = not create_graph and all(self._can_wait(leaf) for leaf in leaves)
            if self._count == 0:
                if not (fits and self._can_start()):
                    self._count_vain_cycle()
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
        """Whether accumulation has no state: no watch on ``grad``, no postponed sums, no failed backwards."""
        return not (self._is_patched or self._owed or self._batches or self._num_failed)

    def add_owed(self, leaves: Iterable[Tensor]) -> None:
        """Record that a backward adds this rank's own gradients to ``leaves``, to be averaged later."""
        self._owed.update((id(leaf), leaf) for leaf in leaves)

    def add_owed_inside(self, leaves: Iterable[Tensor]) -> None:
        """Record leaves to which a checkpoint's backward adds inside a postponed backward; postpone no more."""
        self.add_owed(leaves)
        self._over = True  # such leaves are unknown before the outer backward runs

    def take_pending(self, *, runs: bool = True) -> BackwardGradients:
        """Return the postponed sums as the start of the next reduction, and forget them here.

        Args:
            runs: whether a backward follows whose gradients join the reduction.
        """
        pending = BackwardGradients(list(self._owed.values()), self._count if self._owed else 1)
        if self._is_patched and not self._over:
            pending.habits = repr(tuple(self._lengths)).encode()
        self._owed = {}
        pending.batches = [*self._batches, self._session.position] if runs else self._batches
        self._batches = []
        pending.num_failed, self._num_failed = self._num_failed, 0
        return pending

    def record_failures(self, number: int = 1) -> None:
        """Count ``number`` failed backwards, for the signature of the next exchange."""
        self._num_failed += number

    def record_reduction(self, pending: BackwardGradients) -> None:
        """Record the reduction of ``pending``: use the cycle lengths if ranks agreed, else stop postponing.

        Do neither if lengths were not compared.
        """
        if pending.accord:
            self._agreed = tuple(self._lengths)
        self._over = self._over or pending.accord is False
        self._close_if_over()

    def flush(self) -> None:
        """Average the postponed sums; a collective if there are any."""
        if self._owed:
            with self.mark_busy():
                pending = self.take_pending(runs=False)
                pending.restore_hooks()
                self._gradient_averager.average_backward(pending)
                self.record_reduction(pending)

    @contextmanager
    def mark_busy(self) -> Iterator[None]:
        """Ignore reads and writes of gradients in a block: they are lagom's own."""
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    @contextmanager
    def mark_running(self) -> Iterator[None]:
        """Mark a block in which autograd runs, so that a read of a gradient comes from a hook."""
        before, self._is_busy, self._runs = self._is_busy, False, True
        try:
            yield
        finally:
            self._is_busy, self._runs = before, False

    def close(self) -> None:
        """Stop postponing, and give ``Tensor.grad`` back to torch."""
        self._over, self._is_patched = True, False
        self._patches.close()

    def _can_wait(self, leaf: Tensor) -> bool:
        return isinstance(leaf, nn.Parameter) and not has_hooks(leaf) and (leaf.grad is None or id(leaf) in self._owed)

    def _can_start(self) -> bool:
        # Asks all parameters, and not only the reached ones: the answer must be the same on all ranks.
        return all(self._can_wait(leaf) for leaf in self._session.tensors.leaves.parameters().values())

    def _count_vain_cycle(self) -> None:
        self._num_vain += 1
        self._over = self._over or self._num_vain > _MAX_VAIN
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._over and not self._owed:
            self.close()

    def _end_cycle(self) -> None:
        """Average the postponed sums, since the program is about to read or replace a gradient; this ends the cycle.

        In a hook, only stop postponing.

        Raises:
            LagomError: if there are sums, and this thread or process must not exchange data with other ranks.
        """
        if self._runs:
            self._over = True  # a hook reads gradients during the backward, so no sums may be postponed
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
            self._count_vain_cycle()
        else:
            self._num_vain = 0

    def _patch_grad(self) -> None:
        if _is_compiled():
            self._over = True  # compiled code can read gradients without the attribute
            return
        self._is_patched = True
        for name in ("grad", "_grad"):
            self._patches.enter_context(replaced(Tensor, name, self._make_property(vars(torch._C.TensorBase)[name])))
        self._patches.enter_context(at_compilation(self._stop_at_compilation))

    def _stop_at_compilation(self, *_: object) -> None:
        if self._session.may_meet:
            self.flush()
            self._over = True

    def _make_property(self, original: Any) -> property:
        overlap = self._gradient_averager.overlap

        def is_used(tensor: Tensor) -> bool:
            may_be_owed = isinstance(tensor, nn.Parameter) or id(tensor) in self._owed
            return may_be_owed and not (self._is_busy or overlap.is_launching)

        def read(tensor: Tensor) -> Tensor | None:
            if self._count and is_used(tensor):
                self._end_cycle()
            found: Tensor | None = original.__get__(tensor)
            return found

        def write(tensor: Tensor, value: Tensor | None) -> None:
            if id(tensor) in self._owed and is_used(tensor):
                if value is None:
                    self._drop_gradient(tensor)
                else:
                    self._end_cycle()
            original.__set__(tensor, value)

        def delete(tensor: Tensor) -> None:
            if id(tensor) in self._owed and is_used(tensor):
                self._drop_gradient(tensor)
            original.__delete__(tensor)

        return property(read, write, delete, original.__doc__)

    def _drop_gradient(self, leaf: Tensor) -> None:
        """Forget the postponed sum of ``leaf``, since the program deletes its gradient."""
        del self._owed[id(leaf)]
        if not self._owed:
            self._count = 0


def _is_compiled() -> bool:
    return bool(num_compilations()) or bool(torch.jit._state._python_cu.get_functions())  # type: ignore[func-returns-value]


# Note [Accumulation]
#
# A program that accumulates gradients calls backward several times before it uses them. It needs only the sum, and the
# average of sums is the sum of averages, so one reduction is enough. But when a backward returns, it is unknown whether
# the program will use gradients next. So lagom must notice when the program reads a gradient, and predict when it will
# not.
#
# Reads are noticed by the attribute `grad`, which becomes a property when a backward is first about to add to a
# gradient. The program cannot hold a reference to a gradient that it has never read. So a cycle begins only when no
# parameter has a gradient (and therefore never after zero_grad(set_to_none=False)). Compiled code and TorchScript read
# gradients without the attribute. So nothing is postponed if there is such code when `grad` would become a property, or
# once Dynamo compiles. Hooks of parameters need the gradient of each backward: if a parameter has a hook, nothing is
# postponed either.
#
# The prediction: a cycle has as many backwards as the longer of the last two cycles on which the ranks agreed. The last
# backward of a cycle averages the postponed sums together with its own gradients. If the program reads a gradient
# earlier, the sums are averaged at that moment. If it reads later, each further backward is averaged by itself and
# added.
#
# All ranks must decide alike. So a cycle begins by values that are equal on all ranks as long as they take the same
# path: the numbers of backwards between reads, and which of all parameters have gradients and hooks. The leaves that
# this rank's batch reaches decide only if a leaf is no Parameter, or has got a hook or a gradient of the program's
# since. The signature of each reduction has the number of its backwards and the rank's last cycle lengths. If the
# lengths ever differ between ranks (one rank may have read gradients because its own loss was large), nothing is
# postponed any more.
