"""``BackwardGradients``: what one backward adds to the gradients of leaves, kept apart until it has been averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class BackwardGradients:
    """The leaves of one backward. See Note [Hooks of leaves].

    From ``expect`` on a leaf has no gradient; ``leaf.grad`` becomes that of this backward alone, and its hooks wait.

    Args:
        owed: leaves whose gradients are sums of backwards before this one that have not been averaged; they
            stay what they are, and this backward adds to them.
        num_backwards: how many backwards are averaged with this one, itself included.
    """

    def __init__(self, owed: Iterable[torch.Tensor] = (), num_backwards: int = 1) -> None:
        self.num_backwards = num_backwards
        self.num_failed = 0
        """Backwards of this rank that failed since the exchange before; see Note [Backwards that fail]."""
        self.batches: Sequence[int | None] = ()
        """Which batch of its pass each backward is on, as far as known; to be the same on all ranks."""
        self.habits = b""
        """What the rank has learnt of the program; it is to be the same on all of them."""
        self.accord: bool | None = None
        """Whether it was."""
        self.owed = list(owed)
        self._owed = {id(leaf) for leaf in self.owed}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._before.update((id(leaf), (leaf, None)) for leaf in self.owed)
        self._hooks = Hooks()
        self._over = False

    def expect(self, leaves: Iterable[torch.Tensor]) -> None:
        """The backward is about to accumulate into ``leaves``, or has done so on other ranks."""
        for leaf in leaves:
            if id(leaf) not in self._before:
                before = leaf.grad
                self._before[id(leaf)] = (leaf, before)
                if before is not None:
                    leaf.grad = None
                if not self._over:
                    self._hooks.keep_back(leaf)

    def began(self, leaves: Iterable[torch.Tensor]) -> None:
        """The backward is at work on ``leaves`` already, which had no gradients and no hooks before."""
        self._before.update((id(leaf), (leaf, None)) for leaf in leaves)

    @property
    def is_plain(self) -> bool:
        """Whether no leaf had a gradient or a hook before, and nothing is owed."""
        return not (self._owed or self._hooks.any) and all(before is None for _, before in self._before.values())

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Those expected."""
        return [leaf for leaf, _ in self._before.values()]

    @property
    def fresh(self) -> list[torch.Tensor]:
        """Those that had no gradient before."""
        return [leaf for leaf, before in self._before.values() if before is None]

    @property
    def besides(self) -> bytes:
        """What is to be the same on all ranks, besides gradients."""
        return beside(self.batches, self.habits)

    def differed(self) -> None:
        """Ranks have other habits."""
        self.accord, self.habits = False, b""

    def agreed(self) -> None:
        """The ranks had the same signature, of which habits are a part."""
        if self.habits:
            self.accord = True

    def ran(self) -> None:
        """The backward is over, or failed: hooks are what they were."""
        self._over = True
        self._hooks.put_back()

    def finish(self) -> None:
        """Call the hooks, and add what ``leaf.grad`` is to what it was before; in the grad mode of the backward."""
        try:
            # Without hooks any order is right.
            for leaf in sorted(self.leaves, key=self._hooks.place) if self._hooks.any else self.leaves:
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
            leaf.grad = run_hooks(leaf, leaf.grad)
        if before is not None:
            _accumulate(leaf, before)
        for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
            if hook(leaf) is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # as torch says it

    def undo(self) -> None:
        """The backward failed: gradients are what they were; those owed have what was added to them."""
        for key, (leaf, before) in self._before.items():
            if key not in self._owed:
                leaf.grad = before


def beside(batches: Sequence[int | None], habits: bytes = b"") -> bytes:
    """What is to be the same on all ranks, besides gradients: which batches they are of, and what is learnt."""
    return habits if not any(batches) else b"%s %s" % (habits, repr(batches).encode())


def beside_one(batch: int | None) -> bytes:
    """As ``beside``, of one backward."""
    return b" [%d]" % batch if batch else b""


class Hooks:
    """Hooks of leaves that wait: each stands in its place as a note that it was called."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[int, Any], int, Any]] = []
        self._order: dict[int, int] = {}

    @property
    def any(self) -> bool:
        """Whether any leaf had one."""
        return bool(self._kept)

    def keep_back(self, leaf: torch.Tensor) -> None:
        """From now on ``leaf``'s hooks are not called."""
        for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
            for key, hook in list((hooks or {}).items()):
                self._kept.append((hooks, key, hook))  # type: ignore[arg-type]
                hooks[key] = self._note(id(leaf))  # type: ignore[index]

    def put_back(self) -> None:
        """Hooks are called again, but for those removed meanwhile."""
        for hooks, key, hook in self._kept:
            if key in hooks:
                hooks[key] = hook

    def place(self, leaf: torch.Tensor) -> int:
        """When ``leaf``'s were called, in the order of their calls."""
        return self._order.get(id(leaf), len(self._order))

    def _note(self, key: int) -> Callable[[object], None]:
        def note(_: object) -> None:
            self._order.setdefault(key, len(self._order))

        return note


def run_hooks(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What the hooks that were registered with ``leaf.register_hook`` make of ``gradient``."""
    for hook in list((leaf._backward_hooks or {}).values()):
        changed = hook(gradient)
        if changed is not None:
            gradient = changed
    return gradient


def _accumulate(leaf: torch.Tensor, before: torch.Tensor) -> None:
    """As autograd's own AccumulateGrad: in place, unless the gradient is to be differentiated."""
    new = leaf.grad
    assert new is not None
    if torch.is_grad_enabled() or (before.is_sparse and not new.is_sparse):
        leaf.grad = before + new if not before.is_sparse or new.is_sparse else new + before
    else:
        leaf.grad = before.add_(new)


# Note [Hooks of leaves]
#
# On one machine a hook of a leaf sees the gradient of the whole batch. During a backward there is only that of this
# rank's share, and a hook that does more than scale it (clips it, takes its sign, steps an optimizer with it) would
# make something else of it. So hooks wait: each is replaced, in the very dict that its handle removes it from, by a
# note of the order of calls. When gradients have been averaged the hooks are called, in that order.
#
# A hook sees what this backward adds, and not what was there before. So that is put aside, too, and added when the
# average is known. Nothing is averaged twice, then, however often a program accumulates.


# Note [Backwards that fail]
#
# A program may catch what a backward raises and go on with the next batch, as many do when memory runs out. Where all
# ranks do, nothing is amiss. Where one does, the others have had an exchange, or a gradient, that it had not: what
# follows would average its next batch with this one of theirs. So each exchange of gradients says, as a part of its
# place in the program, how many backwards have failed since the one before.
