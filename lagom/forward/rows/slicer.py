"""``Slicer``: split forwards by rows between ranks, where this changes nothing but the speed."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lagom.forward.rows.draws import BranchMismatchError
from lagom.forward.rows.input_reads import InputReadsRecorder
from lagom.forward.rows.module_tree import CallKind, ModuleTree, attribute_numbers, call_kind
from lagom.forward.rows.probe import probe
from lagom.forward.rows.recorder import CallRecorder
from lagom.forward.rows.remade_modules import RemadeModules
from lagom.forward.rows.restore import parameter_checksums
from lagom.forward.rows.sliced_forward import MAX_BRANCHES, NewBranchError, SlicedRuns
from lagom.forward.rows.split_candidate import (
    KnownCalls,
    SplitCandidate,
    SplitFinding,
    is_batch,
    is_dense,
    is_dual,
    measure_call,
    try_again,
)
from lagom.forward.rows.surroundings import Surroundings, watched_writes
from lagom.forward.rows.whole_batch import Gatherer, is_worth_slicing, row_block
from lagom.forward.rows.whole_calls import CallAccount
from lagom.forward.rows.whole_reasons import FilledReason, WholeReason, whole_line
from lagom.inspection.reads import is_tensor
from lagom.inspection.state_parts import items
from lagom.patching.object_reference import ObjectReference
from lagom.patching.replace import replaced
from lagom.watch.step_clock import FORWARD_DIVIDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lagom.session.session import Session

_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
"""Returns the program's hooks on saved tensors; always None with torch 2.6 (see ``watch_packing``)."""
_NO_ACCOUNT = nullcontext()
_MAX_READ_WAYS = 8
"""Number of combinations of numbers, read from the input, after which calls of one kind always run whole."""
_MAX_DOUBLINGS = 20
"""Number of times that the rows of a small module are doubled at most, to find out how many would be split."""
_OF_DIMENSION = frozenset(
    (
        *(WholeReason.MIXES_ROWS, WholeReason.OUTPUT_WITHOUT_ROWS, WholeReason.OTHER_OUTPUTS),
        *(WholeReason.FAILS_ON_PART, WholeReason.FAILS_WITH_OTHER_ROW, WholeReason.DRAWS_UNEVENLY),
    )
)
"""Reasons that a forward gives if its rows are in another dimension."""
_MAX_KINDS = 64
"""Number of kinds of calls of one module after which new kinds are no longer probed."""


@contextmanager
def watch_packing(session: Session) -> Iterator[None]:
    """Split no forwards within the program's hooks on saved tensors, where torch does not tell of them."""
    if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        yield
        return
    enter, leave, depth = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__, 0

    def count(hooks: saved_tensors_hooks, change: int) -> None:
        nonlocal depth
        if not _is_torchs(hooks.pack_hook) and not session.is_in_thread:
            depth += change
            session.forwards.shares_forwards = not depth

    def entered(hooks: saved_tensors_hooks) -> None:
        count(hooks, 1)
        enter(hooks)

    def left(hooks: saved_tensors_hooks, *error: object) -> None:
        leave(hooks, *error)
        count(hooks, -1)

    with replaced(saved_tensors_hooks, "__enter__", entered), replaced(saved_tensors_hooks, "__exit__", left):
        yield


def _is_torchs(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.")


def is_splittable(session: Session, module: nn.Module) -> bool:
    """Return whether ranks may split a call of ``module`` by rows: they should all have the same input now."""
    if (
        not session.distributed
        or session.backwards.depth
        or session.forwards.is_probing
        or not session.forwards.shares_forwards
    ):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing():
        return False  # neither torch.func's transforms nor a traced graph can contain exchanges
    packing = _TOP_HOOKS(True)
    if packing is not None and not _is_torchs(packing[0]):
        return False  # the program's own hooks would pack a part of the batch
    evaluates = not (torch.is_grad_enabled() and module.training)
    if evaluates and session.config.evaluation != "gathered":
        return False
    if session.config.batches == "whole":
        return True
    current = session.passes.evaluation()
    return evaluates and current is not None and not current.own


class Slicer:
    """Slices the forwards of modules that compute their rows one by one, and runs others whole.

    Args:
        original: ``nn.Module.__call__``, or ``MicroBatches.call``.
        outside: returns a context manager in which called modules count as outermost.
    """

    def __init__(self, session: Session, original: Callable[..., Any], outside: Callable[[], Any]) -> None:
        assert session.group is not None
        assert session.backwards.divergence is not None
        self._session = session
        self._group = session.group
        self._runs = SlicedRuns(session, Gatherer(session.group, session.backwards.divergence.find_divergence))
        self._original = original
        self._outside = outside
        self._trees = ModuleTree(session.say_once)
        self._calls: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """``KnownCalls`` of each module."""
        self._remade = RemadeModules()
        session.resumption.learned["forwards"] = self.state, self.restore
        self._depth = 0
        self._has_work = False
        """Whether a forward that is worth slicing was seen, or the user was told that there is none."""

    def state(self) -> list[tuple[nn.Module, Any]]:
        """Return each module with the known facts about its calls, for ``restore`` in another process."""
        return [(module, self._trees.portable(module, calls)) for module, calls in list(self._calls.items())]

    def restore(self, state: Sequence[tuple[nn.Module, Any]]) -> None:
        """Go on from ``state``, which ``Slicer.state`` returned in a process with the same number of ranks."""
        for module, calls in state:
            self._calls[module] = self._trees.put_back(module, calls)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``module(*args, **kwargs)``, where every rank has the same arguments."""
        calls = self._known(module)
        small = calls.small
        if small is not None and args and small == (_dense_shape(args[0]), torch.is_grad_enabled()):
            with calls.small_account or self._small_account(calls, module):
                return self._original(module, *args, **kwargs)
        device = self._session.device
        candidate = self._trees.candidate(module, self._original, args, kwargs, device, says=not self._depth)
        if candidate.rows < self._group.world_size or any(map(is_dual, candidate.leaves)):
            if not candidate.inside and next(module.parameters(), None) is None:
                self._record_small(calls, args)  # a loss function
            with self._account(calls, module, _obstacle(candidate)):
                return self._original(module, *args, **kwargs)
        around = self._trees.surroundings(module)
        kind = call_kind(candidate, around, is_short=candidate.rows < 2 * self._group.world_size)
        kind, finding = self._find(calls, kind, candidate)
        if calls.num_changes > 1:
            return self._run_whole(module, args, kwargs, calls, calls.change)
        if finding is None and len(calls.findings) < _MAX_KINDS:
            return self._run_first(candidate, calls, kind, lambda: self._original(module, *args, **kwargs))
        if finding is None or finding.reason is not None:
            reason = WholeReason.MANY_KINDS.filled(number=_MAX_KINDS) if finding is None else finding.reason
            return self._run_whole(module, args, kwargs, calls, reason)
        if not (finding.sliced or self._is_worth_slicing(finding, candidate)):
            with self._account_of_small(candidate, calls, finding, args):
                return self._original(module, *args, **kwargs)
        return self._run_split(
            candidate, calls, kind, finding, lambda why: self._run_whole(module, args, kwargs, calls, why)
        )

    def _account_of_small(
        self, candidate: SplitCandidate, calls: KnownCalls, finding: SplitFinding, args: tuple[Any, ...]
    ) -> AbstractContextManager[None]:
        """Let calls like this one run whole without checks; return the account of such calls."""
        self._record_small(calls, args)
        self._say_small(candidate.module)
        account = self._small_account(calls, candidate.module)
        if isinstance(account, CallAccount) and account.pays_from is None and torch.is_grad_enabled():
            account.pays_from = self._rows_that_pay(finding, candidate)
        return account

    def _run_split(
        self,
        candidate: SplitCandidate,
        calls: KnownCalls,
        kind: CallKind,
        finding: SplitFinding,
        run_whole: Callable[[FilledReason], Any],
    ) -> Any:
        """Run a forward on this rank's rows, after a probe if it had none; whole if it cannot be split."""
        if self._turned(candidate, finding) is None:
            return run_whole(WholeReason.OTHER_SIZES.filled())
        if not finding.sliced:
            self._probe(candidate, finding)
        elif not self._knows_shapes(finding, candidate):
            return self._record_reads(candidate, calls, kind)
        passing = WholeReason.EQUAL_ROWS
        turned = self._turned(candidate, finding)
        while finding.sliced:
            assert turned is not None
            try:
                with self._session.forwards.whole_calls.split, self._session.clock.during(FORWARD_DIVIDED):
                    return self._runs.run(turned, finding)
            except NewBranchError as error:
                way = error.shapes, error.num_nodes
            except BranchMismatchError:
                if finding.reason is not None:
                    self._say_whole(candidate.module, finding.reason)
                passing = WholeReason.OTHER_BRANCH
                break  # runs whole below, so that errors there are not chained to this one
            self._probe_new_way(candidate, calls, finding, *way)
        return run_whole(finding.reason or passing.filled())

    def _turned(self, candidate: SplitCandidate, finding: SplitFinding) -> SplitCandidate | None:
        """Return the call with its rows first, as at the first call of its kind; None if other arguments have them."""
        if not finding.turned:
            return candidate
        turned = candidate.turn(self._group.world_size)
        return None if turned is None or turned.turned != finding.turned else turned

    def _find(
        self, calls: KnownCalls, kind: CallKind, candidate: SplitCandidate
    ) -> tuple[CallKind, SplitFinding | None]:
        """Return the finding for the numbers that the forward will read from its input, and its kind.

        If the numbers cannot be found for these shapes of the input, it is the first finding that does not know them.
        """
        while (finding := calls.findings.get(kind)) is not None and finding.sliced and finding.input_reads.reads:
            parts = map(candidate.cut_leaves, row_block(0, self._group.world_size, candidate.rows).all_blocks)
            combined = finding.input_reads.combine(parts, candidate.inside)
            if combined == finding.input_reads.values or not self._knows_shapes(finding, candidate):
                break
            kind = kind._replace(way=kind.way + 1)
            if kind.way >= _MAX_READ_WAYS:
                self._refuse(candidate, finding, WholeReason.READS_OFTEN_OTHERS)
        return kind, finding

    def _knows_shapes(self, finding: SplitFinding, candidate: SplitCandidate) -> bool:
        """Return whether the numbers that a forward will read can be found for each rank's rows."""
        num_ranks = self._group.world_size
        shapes = [candidate.shapes_for(rows) for rows in {candidate.rows // num_ranks, -(-candidate.rows // num_ranks)}]
        return not finding.input_reads.reads or all(map(finding.input_reads.knows, shapes))

    def _record_reads(self, candidate: SplitCandidate, calls: KnownCalls, kind: CallKind) -> Any:
        """Run a forward whole, and learn from its operations how its reads depend on the shapes of its input."""
        inputs = [leaf for leaf in candidate.leaves if is_batch(leaf, candidate.rows)]
        recorder = CallRecorder(inputs, (), InputReadsRecorder(candidate.leaves, candidate.inside))
        finding = calls.findings[kind]
        with recorder, self._account(calls, candidate.module, WholeReason.NEW_SHAPES.filled()):
            output = candidate.run(candidate.leaves)
        found, is_learned = recorder.found(), False
        while found is not None and (one := calls.findings.get(kind)) is not None:
            is_learned = one.input_reads.learn(found) or is_learned
            kind = kind._replace(way=kind.way + 1)
        finding.num_new_branches += not is_learned
        if finding.num_new_branches > MAX_BRANCHES:
            self._refuse(candidate, finding, WholeReason.OFTEN_OTHER_BRANCH)
        return output

    def _refuse(self, candidate: SplitCandidate, finding: SplitFinding, reason: WholeReason) -> None:
        """Let all later calls of this kind run whole."""
        finding.reason, finding.sliced = reason.filled(), False
        self._say_whole(candidate.module, finding.reason)

    def _known(self, module: nn.Module) -> KnownCalls:
        calls: KnownCalls | None = self._calls.get(module)
        if calls is None:
            # A snapshot does not have the facts about modules that are gone, and a resumed run must compute alike.
            is_kept = self._session.resumption.is_resumable
            calls = self._calls[module] = KnownCalls() if is_kept else self._remade.known_calls(module)
        return calls

    def _account(
        self, calls: KnownCalls, module: nn.Module, reason: FilledReason | None
    ) -> AbstractContextManager[None]:
        """Return the account of an outermost call for ``reason``; one that counts nothing for other calls."""
        if reason is None or self._depth:
            return _NO_ACCOUNT
        return self._session.forwards.whole_calls.account(calls.accounts, module, reason)

    def _small_account(self, calls: KnownCalls, module: nn.Module) -> AbstractContextManager[None]:
        """Return the account of calls without checks; a module without parameters, such as a loss, has none."""
        if calls.small_account is None and not self._depth:
            has_parameters = next(module.parameters(), None) is not None
            calls.small_account = self._account(calls, module, WholeReason.SMALL.filled() if has_parameters else None)
        return calls.small_account or _NO_ACCOUNT

    def _record_small(self, calls: KnownCalls, args: tuple[Any, ...]) -> None:
        """Let calls with this shape of the first argument, and this grad mode, run whole without further checks."""
        # Only the first argument is compared: comparing all of them takes longer than a small module.
        calls.small = _dense_shape(args[0]) if args else None, torch.is_grad_enabled()

    def _run_first(self, candidate: SplitCandidate, calls: KnownCalls, kind: object, run: Callable[[], Any]) -> Any:
        """Make the first call of a ``kind``; measure its work, and find out whether a probe would have side effects."""
        module, around = candidate.module, Surroundings(candidate.inside)
        before, marks = (attribute_numbers(candidate.inside), around.state()), parameter_checksums(module)
        with watched_writes() as written:
            output, finding = measure_call(candidate, run)
        calls.findings[kind] = finding
        pays = self._is_worth_slicing(finding, candidate)
        self._has_work = self._has_work or pays
        if (attribute_numbers(candidate.inside), around.state()) != before:
            self._record_change(module, calls, kind, WholeReason.CHANGES_NUMBERS)
        elif parameter_checksums(module) != marks:
            self._record_change(module, calls, kind, WholeReason.CHANGES_PARAMETERS)
        elif around.iterates:
            self._refuse(candidate, finding, WholeReason.ITERATOR)
        elif written:
            finding.failure = WholeReason.WRITES.filled()
        elif pays:
            with self._session.forwards.probing():
                self._try_again(candidate, finding)
        return output

    def _try_again(self, candidate: SplitCandidate, finding: SplitFinding) -> None:
        """Call a module on a part of its batch; if it fails, on one of its second dimension."""
        num, statistics = self._group.world_size, self._session.forwards.statistics
        finding.failure = try_again(candidate, finding, num, statistics)
        turned = candidate.turn(num)
        if turned is None or finding.failure is None or finding.failure.reason not in _OF_DIMENSION:
            return
        if try_again(turned, finding, num, statistics) is None:
            finding.turned, finding.failure = turned.turned, None

    def _record_change(self, module: nn.Module, calls: KnownCalls, kind: object, reason: WholeReason) -> None:
        del calls.findings[kind]
        calls.num_changes += 1
        calls.change = reason.filled()
        if calls.num_changes > 1:
            self._say_whole(module, calls.change)

    def _say_small(self, module: nn.Module) -> None:
        """Say once how to share the work of a loop over a loader that trains only small models."""
        session = self._session
        if self._has_work or self._depth or session.rank or not (torch.is_grad_enabled() and module.training):
            return
        if session.config.batches == "whole" and session.passes.trains():
            self._has_work = True
            session.say_once(f"{type(module).__name__} {WholeReason.SMALL.filled()}", is_notice=True)

    def _run_whole(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        calls: KnownCalls,
        reason: FilledReason | None,
    ) -> Any:
        """Run ``module`` whole for ``reason``; modules inside it may be sliced."""
        assert reason is not None
        account = self._session.forwards.whole_calls.account(calls.accounts, module, reason)
        self._depth += 1
        try:
            with account, self._outside():
                return self._original(module, *args, **kwargs)
        finally:
            self._depth -= 1

    def _probe(self, candidate: SplitCandidate, finding: SplitFinding) -> None:
        with self._session.forwards.probing():
            # Otherwise an evaluation may be called with a rank's own share of a training batch.
            candidate = replace(candidate, is_common=self._session.config.batches == "whole")
            if not finding.turned:
                finding.reason = finding.failure
                if finding.failure is None:
                    probe(candidate, finding, self._group.world_size, self._session.forwards.statistics)
            if finding.turned or self._may_turn(finding):
                self._probe_turned(candidate, finding)
        name = type(candidate.module).__name__
        self._session.check_place(f"the second call of {name} with inputs of a kind")
        own = "" if finding.reason is None else f"{finding.reason.reason.name}:{finding.reason.text}"
        gathered = self._group.all_gather_bytes(f"{any(finding.turned)} {own}".encode())
        texts = [one.decode().partition(" ")[::2] for one in gathered]
        if len({is_turned for is_turned, _ in texts}) > 1:
            texts = [("", f"{WholeReason.OTHER_OUTPUTS.name}:{WholeReason.OTHER_OUTPUTS.text}")]
        member, _, text = next(filter(None, [one for _, one in texts]), "").partition(":")
        finding.sliced, finding.reason = not member, None
        if member and member != WholeReason.EQUAL_ROWS.name:  # the next batch may differ
            finding.reason = FilledReason(WholeReason[member], text)
            self._say_whole(candidate.module, finding.reason)

    @staticmethod
    def _may_turn(finding: SplitFinding) -> bool:
        """Return whether a probe has failed in a way in which it does if the rows are in another dimension."""
        reason = finding.reason
        is_first = reason is not None and finding.failure is None and not finding.num_new_branches
        return is_first and reason is not None and reason.reason in _OF_DIMENSION

    def _probe_turned(self, candidate: SplitCandidate, finding: SplitFinding) -> None:
        """Find out whether a forward computes the rows of the second dimension one by one."""
        num, statistics = self._group.world_size, self._session.forwards.statistics
        turned = candidate.turn(num)
        if turned is None:
            return
        other = SplitFinding(finding.work, shapes=finding.shapes, turned=turned.turned, places=finding.places)
        other.branches, other.num_new_branches = finding.branches, finding.num_new_branches
        other.num_mismatches = finding.num_mismatches
        other.reason = None if finding.turned else try_again(turned, other, num, statistics)
        if other.reason is None:
            probe(turned, other, num, statistics)
        if other.sliced and not other.input_reads.reads:
            vars(finding).update(vars(other))
        elif finding.turned or other.reason == WholeReason.EQUAL_ROWS.filled():  # the next batch may differ
            finding.reason = other.reason or WholeReason.READS_NOT_BY_ROWS.filled()

    def _probe_new_way(
        self,
        candidate: SplitCandidate,
        calls: KnownCalls,
        finding: SplitFinding,
        shapes: object,
        num_nodes: int,
    ) -> None:
        """Probe a forward that takes another way than before. See Note [Other ways] in sliced_forward.py."""
        for other in calls.findings.values():
            if not any(map(any, other.branches.values())):
                other.sliced = False  # without gradients there are no nodes to count: probed at its next call
        finding.num_new_branches += 1
        if finding.num_new_branches > MAX_BRANCHES:
            self._refuse(candidate, finding, WholeReason.OFTEN_OTHER_BRANCH)
            return
        self._probe(candidate, finding)
        finding.branches[shapes].add(num_nodes)

    def _say_whole(self, module: nn.Module, reason: FilledReason) -> None:
        if not self._depth:
            has_parts = any(part._parameters for part in self._trees.modules_in(module, says=False)[1:])
            # A module may call others that are no attributes of it, and these may be split too.
            how = " (modules inside it are split where they can be)" if has_parts else ", as in one process"
            self._session.say_once(whole_line(type(module).__name__, how, reason), is_notice=True)

    def _rows_that_pay(self, finding: SplitFinding, candidate: SplitCandidate) -> int:
        """Return a number of rows, the present one times a power of two, from which slicing pays; 0 if none does."""
        numbers = (candidate.rows << power for power in range(1, _MAX_DOUBLINGS))
        return next((rows for rows in numbers if self._is_worth_slicing(finding, candidate, rows)), 0)

    def _is_worth_slicing(self, finding: SplitFinding, candidate: SplitCandidate, rows: int = 0) -> bool:
        return is_worth_slicing(
            finding.work.for_rows(rows or candidate.rows),
            self._group.world_size,
            candidate.device,
            training=torch.is_grad_enabled(),
            shares_memory=self._group.shares_memory,
        )


def _obstacle(candidate: SplitCandidate) -> FilledReason | None:
    """Return why a call with too few rows or with derivatives cannot be split; None for a module without parameters."""
    if candidate.inside:
        is_forward_mode = any(map(is_dual, candidate.leaves))
        return (WholeReason.FORWARD_MODE if is_forward_mode else WholeReason.FEW_ROWS).filled()
    parameters = list(candidate.module.parameters())
    # The first call makes lazy parameters.
    return WholeReason.TORCHSCRIPT.filled() if parameters and not any(map(is_lazy, parameters)) else None


def _dense_shape(data: Any, depth: int = 3) -> object:
    """Return the shape of a tensor, or the shapes in a list, tuple or dict; None for anything else."""
    if is_tensor(data):
        return data.shape if is_dense(data) else None
    return [_dense_shape(one, depth - 1) for one in items(data)] if depth else None
