"""``MicroBatches``: run forwards in parts of a batch, one after another, to keep fewer activations for the backward."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lagom.micro_batches.runner import MicroBatchRunner
from lagom.patching.object_reference import ObjectReference
from lagom.random_states import random_states, set_random_states
from lagom.row_split.draws import OtherWayError
from lagom.row_split.module_tree import ModuleTree, call_kind
from lagom.row_split.probe import NO_MEMORY, UNIFORM, probe
from lagom.row_split.recorder import NotByRowsError
from lagom.row_split.restore import SMALL
from lagom.row_split.split_candidate import SplitCandidate, SplitFinding, is_batch
from lagom.row_split.whole_batch import ForwardWork
from lagom.run_state.malloc_trim import map_large_blocks
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session

_MAX_KINDS = 64
"""Number of kinds of calls of one module after which new kinds are no longer probed."""
_CLOSED = "has a parameter that is all but zero still, behind which rows may be mixed"
_slot: Any = vars(torch._C.TensorBase)["grad"]  # the attribute would count as a read by the program


class MicroBatches:
    """Calls modules, in micro-batches where this is exact. See Note [Micro-batches].

    Args:
        original: ``nn.Module.__call__``.
        alone: returns a context manager in which called modules are not split.
    """

    def __init__(self, session: Session, original: Callable[..., Any], alone: Callable[[], Any]) -> None:
        asked = session.config.micro_batches
        assert asked is not None
        self._session = session
        self._original = original
        self._alone = alone
        self._is_auto = asked == "auto"
        self._num = asked if asked != "auto" else 1
        """Number of micro-batches of a call; with "auto", it is used only for modules inside the running one."""
        self.descends = False
        """Whether modules inside the running module may run in micro-batches by themselves."""
        self._runner = MicroBatchRunner(session, self._left_alone)
        self._insides = ModuleTree(lambda _: None)
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """For each module, the findings by kind of input."""
        self._learnt: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """Number of micro-batches that a module needs, for each module that has run out of memory."""
        self._fitted: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """For each module, the most rows whose forward left memory for a backward, or that cannot be split anyway."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return ``module(*args, **kwargs)``."""
        session = self._session
        if not session.live or session.is_probing or session.depth:
            return self._original(module, *args, **kwargs)
        if self._is_auto and not self.descends:
            return self._call_until_it_fits(module, args, kwargs)
        num = self._num if self._is_auto or torch.is_grad_enabled() else 1
        return self._call_in_parts(module, args, kwargs, num)

    def _call_in_parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> Any:
        """Make the call in ``num`` micro-batches; if a probe refuses this, split modules inside it instead."""
        if num < 2:
            return self._original(module, *args, **kwargs)
        candidate = self._candidate(module, args, kwargs)
        found = self._probed(candidate, num)
        if found is None:
            return self._original(module, *args, **kwargs)
        if found.reason is None:
            begun = random_states()
            try:
                return self._runner.outputs(candidate, found, min(num, candidate.rows))
            except OtherWayError:
                set_random_states(begun)
                found.reason = "goes another way than at its first call, by numbers that it reads or draws"
        if not self.descends:
            self._session.say_once(
                f"{type(module).__name__} does not run in micro-batches, though modules inside it may: it "
                f"{found.reason}"
            )
        before = self.descends, self._num
        self.descends, self._num = True, num
        try:
            return self._original(module, *args, **kwargs)
        finally:
            self.descends, self._num = before

    def _candidate(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitCandidate:
        return self._insides.candidate(module, self._original, args, kwargs, self._session.device)

    def _probed(self, candidate: SplitCandidate, num: int) -> SplitFinding | None:
        """Return the finding for calls of this kind, probing the first one; None if they are not worth a probe.

        This is so for a single row, for one of torch's layers alone, and for new kinds if too many are known.
        """
        if candidate.rows < 2 or _is_single_layer(candidate.module):
            return None
        known: dict[object, SplitFinding] = self._known.setdefault(candidate.module, {})
        kind = call_kind(candidate, self._insides.surroundings(candidate.module))
        found = known.get(kind)
        if found is None and len(known) < _MAX_KINDS:
            found = self._probe(candidate, min(num, candidate.rows))
            if found.reason == NO_MEMORY and sum(is_batch(leaf, candidate.rows) for leaf in candidate.leaves) == 1:
                # If only one tensor has rows, some of them are enough for a probe. Of several tensors, one might have
                # this size by chance, and must not be cut.
                rows = 2 * -(-candidate.rows // num)
                some = [leaf[:rows] if is_batch(leaf, candidate.rows) else leaf for leaf in candidate.leaves]
                found = self._probe(replace(candidate, leaves=some, rows=rows), 2)
            if found.reason not in (NO_MEMORY, UNIFORM, _CLOSED):  # these may not hold at the next call
                known[kind] = found
        return found

    def _probe(self, candidate: SplitCandidate, num: int) -> SplitFinding:
        finding = SplitFinding(ForwardWork(rows=candidate.rows))
        weights = self._session.weights
        sharded = [p for p in candidate.module.parameters() if weights is not None and weights.parts(p) is not None]
        if any(float(p.detach().abs().max()) <= SMALL for p in sharded):
            finding.reason = _CLOSED
            return finding
        with self._left_alone(), torch.no_grad(), self._session.probing():
            probe(candidate, finding, num, self._session.statistics, repeated=True)
        return finding

    def _call_until_it_fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call; repeat it in more micro-batches while memory is short."""
        begun, before = random_states(), self._learnt.get(module, 1)
        num = before
        while True:
            try:
                output = self._attempt(module, args, kwargs, num)
                break
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
            num = self._learnt[module] = self._more(module, args, kwargs, num, short)
        if num > before:
            self._session.say_once(
                f"{type(module).__name__} ran out of memory; from now on its forwards run in {num} micro-batches, "
                "which are computed once more in the backward"
            )
        return output

    def _attempt(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> Any:
        """Make the call; raise if there is too little memory for its backward, and micro-batches would help."""
        output = self._call_in_parts(module, args, kwargs, num)
        rows = args[0].size(0) if args and isinstance(args[0], torch.Tensor) and args[0].dim() else 0
        if num > 1 or not torch.is_grad_enabled() or rows <= self._fitted.get(module, 1):
            return output
        missing = sum(p.nbytes for p in module.parameters() if p.requires_grad and _slot.__get__(p) is None)
        given = sum(one.nbytes for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad)
        try:
            torch.empty(missing + 2 * given, dtype=torch.uint8, device=self._session.device)
        except Exception as error:
            if wanted_bytes(error) is None:
                raise
            found = self._probed(self._candidate(module, args, kwargs), 2)
            if found is not None and found.reason is None:
                raise
        self._fitted[module] = rows
        return output

    def _more(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int, short: Exception
    ) -> int:
        """Return a larger number of micro-batches with which the module fits in memory.

        Args:
            num: the number of micro-batches with which it ran out of memory.
            short: the out-of-memory error.

        Raises:
            Exception: ``short``, with the reason added to its text, if no number of micro-batches helps.
        """
        candidate = self._candidate(module, args, kwargs)
        more = min(2 * num, candidate.rows)
        fitting = None
        reason: str | None = "does not fit, with its backward, in any number of them"
        if more > num:
            found = self._probed(candidate, more)
            if found is None:
                reason = "is a single layer, or has too many kinds of input"
            elif found.reason is not None and not found.repeats:
                reason = found.reason
            else:  # if rows depend on each other, a part of the batch still shows how much memory modules inside need
                try:
                    fitting = self._runner.find_fitting(candidate, found, more)
                except NotByRowsError as error:
                    reason = str(error)
        if fitting is None:
            text = f"micro_batches='auto' does not help here: {type(module).__name__} {reason}"
            short.args = (f"{short.args[0] if short.args else ''}\n{text}",)
            raise short from None
        return fitting

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        before, self.descends = self.descends, False
        try:
            with self._alone():
                yield
        finally:
            self.descends = before


def _is_single_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is one of torch's layers that keep little for a backward besides input and output."""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return is_torchs and not module._modules and not isinstance(module, nn.RNNBase)


# Note [Micro-batches]
#
# The memory that autograd keeps for a backward grows with the batch. A module that computes its rows one by one (the
# probe of the row split shows this) gives the same outputs for parts of the batch, one after another. Each part is
# checkpointed: only its inputs and outputs are kept, and the backward computes each part again before it runs back
# through it. The program sees one call, one output and one backward; gradients of parameters are the sum over the
# parts, which is the sum over the rows. The cost is one more forward.
#
# Unlike the row split, micro-batches run a forward several times, so the forward must not change state: no buffer,
# attribute or BatchNorm statistics. Every part draws the random numbers of the whole batch, and keeps those of its
# rows. All generators begin anew for each part, so dropout is as in the whole batch, in the backward too.
#
# With "auto", a call runs whole first, and again in parts if it runs out of memory. This is exact: there was no step in
# between, the generators are restored, and a probe shows first that the forward changes no state. The number of parts
# is found by trials: the forward and backward of one part, with space reserved for all outputs and their gradients. A
# backward that runs out of memory cannot be repeated, as its graph is gone. So before the first backward of a size,
# memory for its gradients is tried as well, and a lack of it counts like a forward that ran out of memory. Ranks need
# not agree on the number of parts, since nothing here is a collective. (With ``zero_lvl=3``, a rank that needs a
# parameter asks for it, and the others answer wherever they are.)
