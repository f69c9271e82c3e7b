"""``MicroBatches``: run forwards in parts of a batch, one after another, to keep less for the backward."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from lagom.micro_batches.examiner import MicroBatchExaminer, MicroBatchFinding, backward_has_room
from lagom.micro_batches.runner import MicroBatchRunner
from lagom.patching.object_reference import ObjectReference
from lagom.random_states import random_states, set_random_states
from lagom.row_split.module_tree import ModuleTree, kind_of, run_with
from lagom.row_split.recorder import NotByRowsError
from lagom.row_split.split_candidate import SplitCandidate
from lagom.run_state.malloc_trim import map_large_blocks
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.utils._pytree import TreeSpec

    from lagom.session.session import Session

_MAX_KINDS = 64
"""Kinds of input of one module after which new ones are no longer examined."""


class MicroBatches:
    """Calls modules, in micro-batches where this is exact. See Note [Micro-batches].

    Args:
        original: ``nn.Module.__call__``.
        alone: a context in which called modules are not split.
    """

    def __init__(self, session: Session, original: Callable[..., Any], alone: Callable[[], Any]) -> None:
        asked = session.config.micro_batches
        assert asked is not None
        self._session = session
        self._original = original
        self._alone = alone
        self._fixed = asked if asked != "auto" else None
        self.descends = False
        """Modules inside the running module may run in micro-batches by themselves."""
        self._forced = 1
        """Least number of micro-batches for them."""
        self._examiner = MicroBatchExaminer(session)
        self._in_parts = MicroBatchRunner(session, self._left_alone)
        self._insides = ModuleTree(lambda _: None)
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """For each module, the findings by kind of input."""
        self._learnt: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """By module that has run out of memory: the number of micro-batches that it needs."""
        self._fitted: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """By module: the largest number of rows after which there was memory for a backward."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return ``module(*args, **kwargs)``."""
        session = self._session
        if not session.live or session.is_probing or session.depth:
            return self._original(module, *args, **kwargs)
        if self._fixed is not None:
            num = self._fixed if torch.is_grad_enabled() else 1
        else:
            num = max(self._forced, self._learnt.get(module, 1))
            if not self.descends:
                return self._watched(module, args, kwargs, num)
        return self._called(module, args, kwargs, num)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> Any:
        if num < 2:
            return self._original(module, *args, **kwargs)
        candidate, spec = self._candidate(module, args, kwargs)
        num = min(num, candidate.rows)
        found = self._examined(candidate, spec, num) if num > 1 else None
        if found is None:
            return self._original(module, *args, **kwargs)
        if found.finding.reason is None:
            if not found.gains:
                with self._left_alone():
                    return self._original(module, *args, **kwargs)
            return self._in_parts.outputs(candidate, found.finding, num)
        if not self.descends:
            self._session.say_once(
                f"{type(module).__name__} does not run in micro-batches, though modules inside it may: it "
                f"{found.finding.reason}"
            )
        return self._descend(module, args, kwargs, num)

    def _candidate(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[SplitCandidate, TreeSpec]:
        leaves, spec = tree_flatten((args, kwargs))
        inside = self._insides.of(module)
        rows = next((leaf.size(0) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
        run = run_with(partial(self._original, module), args, kwargs, leaves, spec)
        return SplitCandidate(module, inside, run, leaves, rows if inside else 0, self._session.device), spec

    def _examined(self, candidate: SplitCandidate, spec: TreeSpec, num: int) -> MicroBatchFinding | None:
        known: dict[object, MicroBatchFinding] = self._known.setdefault(candidate.module, {})
        kind = kind_of(candidate, spec, self._insides.surroundings(candidate.module))
        found = known.get(kind)
        if found is None and len(known) < _MAX_KINDS:
            with self._left_alone():
                found = self._examiner.look(candidate, num)
            if not found.passing:
                known[kind] = found
        return found

    def _descend(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> Any:
        """Run ``module`` whole; modules inside it may run in micro-batches."""
        before = self.descends, self._forced
        self.descends, self._forced = True, num
        try:
            return self._original(module, *args, **kwargs)
        finally:
            self.descends, self._forced = before

    def _watched(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> Any:
        """Make the call; repeat it in more micro-batches while memory is short."""
        begun, before = random_states(), num
        while True:
            try:
                output = self._called(module, args, kwargs, num) if num > 1 else self._original(module, *args, **kwargs)
                if num > 1 or self._has_room(module, args, kwargs, output):
                    if num > before:
                        self._session.say_once(
                            f"{type(module).__name__} ran out of memory; from now on its forwards run in {num} "
                            "micro-batches, which are computed once more in the backward"
                        )
                    return output
                del output
                short: Exception = RuntimeError("gradients would not have had room")
            except Exception as error:
                if wanted_bytes(error) is None:
                    raise
                short = error
            # The frames of the traceback hold the forward's tensors.
            traceback.clear_frames(short.__traceback__)
            if self._session.device.type == "cuda":
                torch.cuda.empty_cache()
            else:
                map_large_blocks()
            set_random_states(begun)
            num = self._more(module, args, kwargs, num, short)
            self._learnt[module] = num

    def _has_room(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        """Return False if memory for the backward is short and micro-batches would help."""
        rows = args[0].size(0) if args and isinstance(args[0], torch.Tensor) and args[0].dim() else 0
        if not torch.is_grad_enabled() or rows <= self._fitted.get(module, 1):
            return True
        if not backward_has_room(module, output, self._session.device):
            candidate, spec = self._candidate(module, args, kwargs)
            found = self._examined(candidate, spec, 2) if candidate.rows > 1 else None
            if found is not None and found.finding.reason is None and found.gains:
                return False
        self._fitted[module] = rows
        return True

    def _more(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int, short: Exception
    ) -> int:
        """Return a number of micro-batches that the module fits in, after it ran out of memory in ``num``.

        Raises:
            Exception: ``short``, if micro-batches do not help.
        """
        name = type(module).__name__
        candidate, spec = self._candidate(module, args, kwargs)
        try:
            with self._left_alone():
                more = self._examiner.number(candidate, 2 * num) if candidate.rows > num else None
            if more is None:
                raise NotByRowsError("does not fit, with its backward, in any number of them")
            found = self._examined(candidate, spec, more)
            if found is None or not (found.finding.reason is None or found.repeats):
                raise NotByRowsError("is unknown" if found is None else str(found.finding.reason))
        except NotByRowsError as error:
            text = f"micro_batches='auto' does not help here: {name} {error}"
            short.args = (f"{short.args[0] if short.args else ''}\n{text}",)
            raise short from None
        return more

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        before, self.descends = self.descends, False
        try:
            with self._alone():
                yield
        finally:
            self.descends = before


# Note [Micro-batches]
#
# The memory that autograd keeps for a backward grows with the batch. A module that computes its rows one by one (the
# probe of the row split shows this) gives the same outputs for parts of the batch, one after another. Each part is
# checkpointed: only its inputs and outputs are kept, and the backward computes each part again before it runs back
# through it. The program sees one call, one output and one backward; gradients of parameters are the sum over the
# parts, which is the sum over the rows. The cost is one more forward.
#
# Other than slicing, this repeats a forward, so the forward may change no state: no buffer, attribute or BatchNorm
# statistics. Every part draws the random numbers of the whole batch, and keeps those of its rows. All generators begin
# anew for each part, so dropout is that of the whole batch, in the backward too.
#
# With "auto", a call runs whole first, and again in parts when it has run out of memory: there was no step yet, the
# generators are restored, and the examination shows beforehand that the forward changes no state. The number of parts
# is found by trials: the forward and backward of one part, with space reserved for all outputs and their gradients. A
# backward that runs out of memory cannot be repeated, as its graph is gone. So before the first backward of a size,
# memory for its gradients is tried as well, and a lack of it counts like a forward that ran out of memory. Ranks need
# not agree, as all this exchanges nothing.
