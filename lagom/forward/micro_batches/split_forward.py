"""``MicroBatches``: run forwards in parts of a batch, one after another, to keep fewer activations for the backward."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lagom.forward.micro_batches.runner import MicroBatchRunner
from lagom.forward.rows.draws import BranchMismatchError
from lagom.forward.rows.module_tree import ModuleTree, call_kind
from lagom.forward.rows.probe import probe
from lagom.forward.rows.restore import SMALL
from lagom.forward.rows.split_candidate import SplitCandidate, SplitFinding, is_batch
from lagom.forward.rows.whole_batch import ForwardWork
from lagom.forward.rows.whole_reasons import WholeReason
from lagom.patching.object_reference import ObjectReference
from lagom.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session

_MAX_KINDS = 64
"""Number of kinds of calls of one module after which new kinds are no longer probed."""
_PASSING = (WholeReason.NO_MEMORY, WholeReason.EQUAL_ROWS, WholeReason.CLOSED_GATE)
"""Reasons that may no longer hold at the next call."""


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
        self._num = asked
        self.descends = False
        """Whether modules inside the running module may run in micro-batches by themselves."""
        self._runner = MicroBatchRunner(session, self._left_alone)
        self._insides = ModuleTree(lambda _: None)
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """For each module, the findings by kind of input."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return ``module(*args, **kwargs)``."""
        session = self._session
        if not session.live or session.forwards.is_probing or session.backwards.depth:
            return self._original(module, *args, **kwargs)
        if self._num < 2 or not torch.is_grad_enabled():
            return self._original(module, *args, **kwargs)
        return self._call_in_parts(module, args, kwargs)

    def _call_in_parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call in micro-batches; if a probe refuses this, split modules inside it instead."""
        candidate = self._candidate(module, args, kwargs)
        finding = self._probed(candidate)
        if finding is None:
            return self._original(module, *args, **kwargs)
        if finding.reason is None:
            begun = random_states()
            try:
                return self._runner.outputs(candidate, finding, min(self._num, candidate.rows))
            except BranchMismatchError:
                set_random_states(begun)
                finding.reason = WholeReason.OTHER_BRANCH.filled()
        if not self.descends:
            self._session.say_once(
                f"{type(module).__name__} does not run in micro-batches, though modules inside it may: it "
                f"{finding.reason}"
            )
        before, self.descends = self.descends, True
        try:
            return self._original(module, *args, **kwargs)
        finally:
            self.descends = before

    def _candidate(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitCandidate:
        return self._insides.candidate(module, self._original, args, kwargs, self._session.device)

    def _probed(self, candidate: SplitCandidate) -> SplitFinding | None:
        """Return the finding for calls of this kind, probing the first one; None if they are not worth a probe.

        This is so for a single row, for one of torch's layers alone, and for new kinds if too many are known.
        """
        if candidate.rows < 2 or _is_single_layer(candidate.module):
            return None
        known: dict[object, SplitFinding] = self._known.setdefault(candidate.module, {})
        kind = call_kind(candidate, self._insides.surroundings(candidate.module))
        finding = known.get(kind)
        if finding is None and len(known) < _MAX_KINDS:
            finding = self._probe(candidate, min(self._num, candidate.rows))
            num_batches = sum(is_batch(leaf, candidate.rows) for leaf in candidate.leaves)
            if _is_for(finding, WholeReason.NO_MEMORY) and num_batches == 1:
                # If only one tensor has rows, some of them are enough for a probe. Of several tensors, one might have
                # this size by chance, and must not be cut.
                rows = 2 * -(-candidate.rows // self._num)
                some = [leaf[:rows] if is_batch(leaf, candidate.rows) else leaf for leaf in candidate.leaves]
                finding = self._probe(replace(candidate, leaves=some, rows=rows), 2)
            if not _is_for(finding, *_PASSING):
                known[kind] = finding
        return finding

    def _probe(self, candidate: SplitCandidate, num: int) -> SplitFinding:
        finding = SplitFinding(ForwardWork(rows=candidate.rows))
        store = self._session.backwards.parameter_store
        sharded = [p for p in candidate.module.parameters() if store.is_sharded(p)]
        if any(float(p.detach().abs().max()) <= SMALL for p in sharded):
            finding.reason = WholeReason.CLOSED_GATE.filled()
            return finding
        with self._left_alone(), torch.no_grad(), self._session.forwards.probing():
            probe(candidate, finding, num, self._session.forwards.statistics, repeated=True)
        return finding

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        before, self.descends = self.descends, False
        try:
            with self._alone():
                yield
        finally:
            self.descends = before


def _is_for(finding: SplitFinding, *reasons: WholeReason) -> bool:
    return finding.reason is not None and finding.reason.reason in reasons


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
