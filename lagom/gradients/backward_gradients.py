"""``BackwardGradients``: keeps the gradients of one backward apart from earlier ones until they are averaged.

A parameter that several modules share is taken once: see Note [Shared parameters].
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagom.patching.replace import replaced
from lagom.run_state.leaf_hooks import hooks_after, hooks_before
from lagom.run_state.leaves import ACCUMULATE, leaf_of_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


_NO_TASK = -2
"""Number of the backward of leaves that only other ranks have reached, if this rank has called no hook."""


class BackwardGradients:
    """Keeps a backward's gradients apart from earlier ones, and holds back hooks, until the averages are there.

    See Note [Hooks of leaves].

    ``expect`` puts a leaf's gradient aside and holds back its hooks, so ``leaf.grad`` becomes this backward's alone.

    Args:
        owed: leaves whose gradients are postponed sums of earlier backwards; this backward adds to these sums.
        num_backwards: number of backwards that are averaged together, with this one.
    """

    def __init__(self, owed: Iterable[torch.Tensor] = (), num_backwards: int = 1) -> None:
        self.num_backwards = num_backwards
        self.num_failed = 0
        """Backwards of this rank that failed since the last exchange; see Note [Backwards that fail]."""
        self.batches: Sequence[int | None] = ()
        """For each backward the number of its batch in the pass, if known; must be equal on all ranks."""
        self.habits = b""
        """The program's last cycle lengths, which should be equal on all ranks.

        See Note [Accumulation] in accumulation.py.
        """
        self.accord: bool | None = None
        """Whether ``habits`` were equal on all ranks; None before the exchange, or if they are empty."""
        self.owed = list(owed)
        self._owed = {id(leaf) for leaf in self.owed}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._before.update((id(leaf), (leaf, None)) for leaf in self.owed)
        self._hooks = DelayedHooks()
        self._over = False

    def expect(self, leaves: Iterable[torch.Tensor]) -> None:
        """Put aside gradients and hooks of ``leaves`` that the backward will reach, or has reached on another rank.

        After ``restore_hooks``, put aside gradients only. A leaf that is expected already is left as it is; see Note
        [Shared parameters].
        """
        for leaf in leaves:
            if id(leaf) not in self._before:
                before = leaf.grad
                self._before[id(leaf)] = (leaf, before)
                if before is not None:
                    leaf.grad = None
                if not self._over:
                    self._hooks.delay(leaf)

    def add_running(self, leaves: Iterable[torch.Tensor]) -> None:
        """Add ``leaves`` of a backward that runs or has ended; they had no gradients and no hooks before."""
        self._before.update((id(leaf), (leaf, None)) for leaf in leaves)

    @property
    def is_plain(self) -> bool:
        """Whether no leaf had a gradient, a hook or a postponed sum before."""
        return not (self._owed or self._hooks.has_hooks) and all(before is None for _, before in self._before.values())

    @property
    def leaves(self) -> list[torch.Tensor]:
        """All leaves to average: of this backward, of postponed sums, and those that only other ranks have reached."""
        return [leaf for leaf, _ in self._before.values()]

    @property
    def without_gradient(self) -> list[torch.Tensor]:
        """The leaves for which no earlier average is put aside; those with postponed sums are among them."""
        return [leaf for leaf, before in self._before.values() if before is None]

    @property
    def identity(self) -> bytes:
        """Bytes for the signature: batches and habits, which must be equal on all ranks."""
        return encode_batches(self.batches, self.habits)

    def record_disagreement(self) -> None:
        """Record that the ranks have different habits."""
        self.accord, self.habits = False, b""

    def record_agreement(self) -> None:
        """Record that the ranks had equal signatures, and so equal habits."""
        if self.habits:
            self.accord = True

    def restore_hooks(self) -> None:
        """Restore the hooks, after the backward has ended or failed."""
        self._over = True
        self._hooks.restore()

    def finish(self) -> None:
        """Call the hooks with the averages, and add the averages to the earlier gradients.

        If a hook raises an error, restore the earlier gradients. Call this in the grad mode of the backward.
        """
        try:
            leaves = self.leaves
            if self._hooks.has_hooks:
                leaves.sort(key=self._hooks.call_order)
                self._hooks.add_reached(leaf for leaf in leaves if leaf.grad is not None)
            for leaf in leaves:
                self._finish(leaf)
        except BaseException:
            self.undo()
            raise

    def _finish(self, leaf: torch.Tensor) -> None:
        before = self._before[id(leaf)][1]
        if leaf.grad is None:
            leaf.grad = before
            return
        if leaf._backward_hooks:
            leaf.grad = self._hooks.run(leaf, leaf.grad)
        added: torch.Tensor | None = leaf.grad
        if any(hooks_before(leaf)):
            added = leaf.grad = _run_hooks_before(leaf, leaf.grad)
        if added is None:
            leaf.grad = before
        elif before is not None:
            _accumulate(leaf, before)
        for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
            if hook(leaf) is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # torch's own text
        for hook in [hook for hooks in hooks_after(leaf) for hook in hooks.values()]:
            hook((), (added,))

    def undo(self) -> None:
        """Restore the earlier gradients after a failed backward. Postponed sums keep what was added to them."""
        for key, (leaf, before) in self._before.items():
            if key not in self._owed:
                leaf.grad = before


def encode_batches(batches: Sequence[int | None], habits: bytes = b"") -> bytes:
    """Return bytes for a signature of ``batches`` and ``habits``, which must be equal on all ranks."""
    return habits if not any(batches) else b"%s %s" % (habits, repr(batches).encode())


def encode_batch(batch: int | None) -> bytes:
    """Return ``encode_batches([batch])``, in less time."""
    return b" [%d]" % batch if batch else b""


class DelayedHooks:
    """Holds back the hooks of leaves, or of inputs of ``torch.autograd.grad``: stand-ins record the order of calls."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[int, Any], int, Any]] = []
        self._order: dict[int, int] = {}
        self._tasks: dict[int, int] = {}
        """By id of a leaf, torch's number of the backward that has called its hooks."""

    @property
    def has_hooks(self) -> bool:
        """Whether any hook is held back."""
        return bool(self._kept)

    def delay(self, leaf: torch.Tensor) -> None:
        """Replace ``leaf``'s hooks by stand-ins that only record the call."""
        of_node = *hooks_before(leaf), *hooks_after(leaf)
        for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks, *of_node):
            for key, hook in list((hooks or {}).items()):
                self._kept.append((hooks, key, hook))  # type: ignore[arg-type]
                hooks[key] = self._make_note(id(leaf))  # type: ignore[index]

    def restore(self) -> None:
        """Restore all hooks, except those that the program has removed meanwhile."""
        for hooks, key, hook in reversed(self._kept):  # if a leaf was delayed twice, the second time kept a stand-in
            if key in hooks:
                hooks[key] = hook

    def call_order(self, leaf: torch.Tensor) -> int:
        """Return the place of ``leaf`` in the order in which hooks were called; leaves without a call come last."""
        return self._order.get(id(leaf), len(self._order))

    def add_reached(self, leaves: Iterable[torch.Tensor]) -> None:
        """Add ``leaves`` whose hooks are to be called, also if only other ranks have reached them."""
        task = next(iter(self._tasks.values()), _NO_TASK)
        for leaf in leaves:
            self._tasks.setdefault(id(leaf), task)

    def run(self, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Call the hooks of ``leaf.register_hook`` in turn, and return the gradient that they make of ``gradient``."""
        if not leaf._backward_hooks:
            return gradient
        with self._as_in_backward(self._tasks.get(id(leaf), _NO_TASK)):
            for hook in list(leaf._backward_hooks.values()):
                changed = hook(gradient)
                if changed is not None:
                    gradient = changed
        return gradient

    @contextmanager
    def _as_in_backward(self, task: int) -> Iterator[None]:
        """Answer the questions of hooks from ``register_multi_grad_hook`` as in the backward with number ``task``.

        They ask which backward calls them, and at the first call which of their tensors it reaches. If the first call
        is a delayed one, no hook of a tensor that is no leaf was called before, so the backward reaches none of these.
        """
        current, executes = torch._C._current_graph_task_id, torch._C._will_engine_execute_node

        def current_task() -> int:
            return task if (running := current()) == -1 else running

        def will_execute(node: Any) -> bool:
            if current() != -1:  # a hook has started a backward of its own
                return executes(node)
            return type(node) is ACCUMULATE and self._tasks.get(id(leaf_of_node(node))) == task

        with (
            replaced(torch._C, "_current_graph_task_id", current_task),
            replaced(torch._C, "_will_engine_execute_node", will_execute),
        ):
            yield

    def _make_note(self, key: int) -> Callable[..., None]:
        def note(*_: object) -> None:
            self._order.setdefault(key, len(self._order))
            self._tasks.setdefault(key, torch._C._current_graph_task_id())

        return note


def _run_hooks_before(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """Call the hooks of the leaf's node that come before it accumulates; return the gradient that they make."""
    given: tuple[torch.Tensor | None] = (gradient,)
    for hook in [hook for hooks in hooks_before(leaf) for hook in hooks.values()]:
        changed = hook(given)
        if changed is not None:
            if not isinstance(changed, tuple):  # torch's own texts
                raise TypeError(f"expected tuple, but hook returned '{type(changed).__name__}'")
            if len(changed) != 1:
                raise RuntimeError(
                    f"hook '{getattr(hook, '__name__', '<unknown>')}' has returned an incorrect number of values "
                    f"(got {len(changed)}, but expected 1)"
                )
            given = changed
    return given[0]


def _accumulate(leaf: torch.Tensor, before: torch.Tensor) -> None:
    """Add ``before`` to ``leaf.grad`` as autograd does: in place, into ``before``, where this is possible.

    A new tensor is made if grad mode is on, since the gradient may be differentiated, or if only ``before`` is sparse.
    """
    new = leaf.grad
    assert new is not None
    if torch.is_grad_enabled() or (before.is_sparse and not new.is_sparse):
        leaf.grad = before + new if not before.is_sparse or new.is_sparse else new + before
    else:
        leaf.grad = before.add_(new)


# Note [Hooks of leaves]
#
# In one process a hook of a leaf gets the gradient of the whole batch. During a backward on ranks, only the gradient of
# this rank's share exists. A hook that is not linear (that clips, takes the sign, or steps an optimizer) would compute
# another result from it. So hooks are held back: a stand-in replaces each hook, in the dict from which the hook's
# handle removes it, and records the order of calls. When gradients are averages, the leaves' hooks are called in that
# order of the leaves, and those of one leaf in torch's order: hooks of `register_hook`, prehooks of the leaf's
# AccumulateGrad node, hooks of `register_post_accumulate_grad_hook`, hooks of the node.
#
# A hook of `register_hook` gets the gradient of this backward, without earlier ones. So earlier gradients are put
# aside, and added to the average before post-accumulate hooks run. Therefore no gradient is averaged twice, however
# many backwards a program accumulates.


# Note [Shared parameters]
#
# A parameter that several modules share (tied weights) is one leaf: autograd adds what each use contributes. `expect`
# takes a leaf once, by its id, so `average_backward` averages the sum once, without earlier averages. Uses in forwards
# that are split by rows and uses in whole forwards may mix: a use in a split forward contributes the gradient of this
# rank's rows, times the number of ranks (see Note [Whole] in row_functions.py). The other ways of a backward
# take a leaf once, too: `BackwardCache` keeps no list of leaves in which one is there twice, the hook in
# `overlap.py` runs once for each leaf, and `accumulation.py` finds what it owes by the leaf's id.


# Note [Backwards that fail]
#
# A program may catch the error of a backward and continue with the next batch, as many do when memory runs out. If the
# backward fails on all ranks, they stay together. If it fails on one rank only, the other ranks wait in the exchange of
# this batch. The failed rank would join that exchange with the gradients of its next batch, and gradients of different
# batches would be averaged. So the signature of the exchange at the end of a backward contains the number of backwards
# that have failed on the rank since the last such exchange. Different numbers are a ``DivergenceError`` on all ranks.
