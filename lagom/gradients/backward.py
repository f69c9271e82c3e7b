"""Patches backward: weights the root by this rank's share of the batch, and averages gradients over the ranks."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lagom.accelerators import is_recording
from lagom.errors import DivergenceError, LagomError
from lagom.forward.rows.path_to_output import watch_gradient
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.gradients.accumulation import Accumulation
from lagom.gradients.autograd_grad import AutogradGradAverager, GradCalls, inside_backward
from lagom.gradients.backward_gradients import encode_batch
from lagom.gradients.cached_backward import BackwardCache, can_repeat
from lagom.gradients.replicas import Replicas
from lagom.patching.replace import replaced
from lagom.run_state.leaf_hooks import watch_node_hooks
from lagom.run_state.leaves import find_leaves
from lagom.watch.step_clock import BACKWARD, BACKWARD_DIVIDED, EXCHANGE, OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from lagom.gradients.backward_gradients import BackwardGradients
    from lagom.gradients.cached_backward import CachedBackward
    from lagom.session.session import Session


@contextmanager
def synchronise_backward(session: Session, knows_rank: Callable[[], bool]) -> Iterator[None]:
    """Patch autograd so that backwards and ``torch.autograd.grad`` average gradients over the ranks.

    ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all call
    ``torch.autograd._engine_run_backward``. So a patch of this one function works, however the program imported the
    three. Its arguments begin with the outputs, their gradients, ``retain_graph``, ``create_graph`` and the inputs, in
    this order. The option ``accumulate_grad`` is False in a call from ``torch.autograd.grad``.

    Args:
        knows_rank: tells whether the program has asked for its rank.
    """
    original = torch.autograd._engine_run_backward
    backwards, threads = _Backwards(session, original, knows_rank), TrainingThreads()
    clock, is_whole = session.clock, session.config.batches == "whole"

    def begin(*, is_grad: bool) -> int:
        part = BACKWARD if is_whole or session.passes.share is None else BACKWARD_DIVIDED
        return clock.switch(part) if is_grad else clock.begin_backward(part)

    @torch._disable_dynamo  # a compiled step breaks its graph here, and Dynamo would compile all that follows inside
    def run_backward(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if not session.live:
            return original(outputs, *args, **options)
        if session.device.type != "cpu":
            _refuse_recording(session.device)
        for one in args[3]:
            watch_gradient(one.node if isinstance(one, GradientEdge) else one.grad_fn)
        is_grad, is_inner = not options.get("accumulate_grad", False), session.backwards.depth > 0
        run = backwards.grad_calls.run if is_grad else backwards.run_backward
        part = OUTSIDE if is_inner else begin(is_grad=is_grad)
        try:
            threads.check()
            return run(outputs, args, options)
        except DivergenceError as error:
            backwards.divergence.record_error(error)
            raise
        finally:
            if not is_inner:
                clock.switch(part)

    session.resumption.learned["backwards"] = backwards.state, backwards.restore
    with replaced(torch.autograd, "_engine_run_backward", run_backward), watch_node_hooks():
        try:
            yield
        finally:
            backwards.accumulation.close()


def _refuse_recording(device: torch.device) -> None:
    """Refuse a backward that a graph (NVIDIA's CUDA graphs) records: nobody would average its replays' gradients."""
    if is_recording(device):
        raise LagomError(
            "a CUDA graph records this backward, and its replays would leave out the exchange with the other ranks; "
            "run the backward outside of torch.cuda.graph(), or use torch.compile(model, mode='reduce-overhead')"
        )


class _Backwards:
    """Runs backwards. A backward inside another (a re-entrant checkpoint) is part of the outer one."""

    def __init__(self, session: Session, original: Callable[..., Any], knows_rank: Callable[[], bool]) -> None:
        assert session.group is not None
        assert session.backwards.divergence is not None
        assert session.backwards.gradient_averager is not None
        self._session = session
        self._store = session.backwards.gradient_store
        self._begun = session.events.backward_begun
        self._original = original
        self.divergence = session.backwards.divergence
        self._gradient_averager = session.backwards.gradient_averager
        self._grads = AutogradGradAverager(
            session.group, session.tensors.leaves, session.backwards.divergence, session.backwards.gradient_averager
        )
        self.grad_calls = GradCalls(session, original, self._grads)
        self._pending: BackwardGradients | None = None
        """Gradients of the backward that runs now, to which a backward inside it adds its leaves; else None."""
        self._keeps = False
        """Whether a backward runs whose averaging is postponed."""
        self._cache = BackwardCache(session.tensors.leaves)
        self._replicas = Replicas(session, session.backwards.gradient_averager, knows_rank)
        session.backwards.gradient_averager.set_comparison(self._replicas.compare)
        self._running: Sequence[Tensor] = ()
        """Leaves of the cached backward that runs now; empty if none runs. See ``_run_cached``."""
        self.accumulation = Accumulation(session, self._gradient_averager)
        if self._store.keeps_shards or not self._gradient_averager.reduction.is_linear:
            # Ranks keep shards so that no whole gradients stay. And if a reduction is not linear, its result
            # must not depend on the moment at which lagom notices that the program accumulates.
            self.accumulation.close()

    def state(self) -> list[tuple[None, Any]]:
        """Return the facts that decide how gradients are averaged, for ``restore`` in another process.

        Raises:
            LagomError: if averages of accumulated gradients are postponed now.
        """
        return [(None, (self._replicas.is_over, self.accumulation.state()))]

    def restore(self, state: Sequence[tuple[None, Any]]) -> None:
        """Average gradients as the process that has returned ``state`` did."""
        ((_, (self._replicas.is_over, accumulation)),) = state
        self.accumulation.restore(accumulation)

    def run_backward(self, outputs: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run ``backward``; average gradients when the outermost backward ends, unless ``Accumulation`` postpones this.

        Raises:
            NotByRowsError: if this is part of a forward that is being probed.
        """
        if self._session.forwards.is_probing:
            raise NotByRowsError(WholeReason.RUNS_BACKWARD)
        # Before the backward, which frees the graph.
        leaves = find_leaves(outputs, args[3])
        if (call := self._begun.call) is not None and not self._session.backwards.depth:
            call(leaves)
        if not args[2] and self._may_use_cache() and (cached := self._cache.find(leaves)) is not None:
            return self._run_cached(cached, leaves, outputs, args, options)
        leaves = [leaf for leaf in leaves if leaf not in self._session.tensors.repeated_inputs]
        if self._session.backwards.depth:
            with self.accumulation.mark_busy():
                if self._running:
                    self._pending, self._running = self._take_pending(self._running), ()
                if self._pending is not None:
                    self._gradient_averager.overlap.delay_leaves(leaves)
                    self._pending.expect(leaves)
                elif self._keeps:
                    self.accumulation.add_owed_inside(leaves)
            with inside_backward(self._session):
                return self._original(outputs, *args, **options)
        self._session.begin_backward(outputs, leaves)
        if self.accumulation.begin_backward(leaves, create_graph=bool(args[2])):
            return self._run_without_averaging(leaves, outputs, args, options)
        with self.accumulation.mark_busy():
            with self._store.prepare_backward(leaves):
                result, is_reduced = self._run_and_average(leaves, outputs, args, options)
            if is_reduced:
                self._session.record_backward()
            return result

    def _run_without_averaging(
        self, leaves: list[Tensor], outputs: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Run a backward whose averaging is postponed: afterwards gradients are this rank's own."""
        gradients, hooks = self._session.backwards.loss_weights.weight_gradients(outputs, args[0], self._session.weight)
        self.accumulation.add_owed(leaves)
        self._keeps = True
        try:
            with inside_backward(self._session), self.accumulation.mark_running():
                result = self._original(outputs, gradients, *args[1:], **options)
        except BaseException:
            self.accumulation.record_failures()
            raise
        finally:
            self._keeps = False
            for hook in hooks:
                hook.remove()
        self.divergence.count_step()
        self._session.record_backward()
        return result

    def _may_use_cache(self) -> bool:
        if self._session.backwards.depth or self._store.keeps_shards or self._gradient_averager.overlap.may_start:
            return False
        return self.accumulation.is_idle

    def _run_cached(
        self,
        cached: CachedBackward,
        leaves: Sequence[Tensor],
        outputs: Sequence[Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Run a backward that repeats an earlier one. See Note [Cached backwards] in cached_backward.py."""
        session = self._session
        session.record_loss(outputs)
        hooks: list[RemovableHandle] = []
        gradients, weight = args[0], session.weight
        if weight != 1.0 or session.backwards.loss_weights.may_be_uneven:
            gradients, hooks = session.backwards.loss_weights.weight_gradients(outputs, gradients, weight)
        self._running = leaves
        session.backwards.depth += 1
        try:
            result = self._original(outputs, gradients, *args[1:], **options)
        except BaseException:
            pending = self._pending or self._take_pending(leaves)
            self._pending = None
            pending.undo()
            pending.restore_hooks()
            self.accumulation.record_failures()
            raise
        finally:
            session.backwards.depth -= 1
            self._running = ()
            for hook in hooks:
                hook.remove()
        session.clock.switch(EXCHANGE)
        inner, self._pending = self._pending, None
        self.divergence.count_step()
        collected = None
        if inner is None and not self._replicas.skip(cached.layout):
            collected = cached.collect_gradients(leaves)
            place = encode_batch(session.position)
            if collected is None or not self._gradient_averager.reduce_cached(cached.layout, collected, place):
                inner = self._take_pending(leaves)
        if inner is not None:
            inner.restore_hooks()
            self._finish(inner, create_graph=False, is_counted=True, differs=collected is not None)
            session.record_backward()
            return result
        session.distributed_part = session.distributed_part or "a backward ran"
        session.record_backward()
        return result

    def _take_pending(self, leaves: Sequence[Tensor]) -> BackwardGradients:
        pending = self.accumulation.take_pending()
        pending.add_running(leaves)
        return pending

    def _run_and_average(
        self, leaves: list[Tensor], outputs: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, bool]:
        """Run a backward, and average its gradients and postponed sums when it ends.

        Return autograd's result, and whether gradients were averaged: the backward may have no leaves.
        """
        pending = self._pending = self.accumulation.take_pending()
        hooks: list[RemovableHandle] = []
        try:
            pending.expect(leaves)
            gradients, hooks = self._session.backwards.loss_weights.weight_gradients(
                outputs, args[0], self._session.weight
            )
            if leaves and not args[2]:
                self._gradient_averager.begin_backward(pending)
            with inside_backward(self._session), self.accumulation.mark_running():
                result = self._original(outputs, gradients, *args[1:], **options)
        except BaseException:
            try:
                self._gradient_averager.overlap.abandon()
            finally:
                pending.undo()
                self.accumulation.add_owed(pending.owed)
                self.accumulation.record_failures(1 + pending.num_failed)
            raise
        finally:
            for hook in hooks:
                hook.remove()
            self._pending = None
            pending.restore_hooks()
        if not pending.leaves:
            self.accumulation.record_failures(pending.num_failed)
            return result, False
        repeats = pending.is_plain and self._may_use_cache() and not args[2] and can_repeat(pending.leaves)
        self._finish(pending, create_graph=bool(args[2]), compares=repeats)
        if repeats and self._gradient_averager.agreed_layout is not None and self._may_use_cache():
            self._cache.add(pending.leaves, self._gradient_averager.agreed_layout)
        return result, True

    def _finish(self, pending: BackwardGradients, *, create_graph: bool, **options: bool) -> None:
        """Average the gradients; then call hooks, add earlier gradients, and hand the sums to the store.

        Args:
            options: arguments for ``average_backward``, which averages gradients that have no graph.
        """
        self._session.distributed_part = self._session.distributed_part or "a backward ran"
        self._session.clock.switch(EXCHANGE)
        with torch.set_grad_enabled(create_graph):
            if create_graph:  # also without a graph here: another rank's gradients may have one
                self._grads.average_accumulated(pending)
            else:
                self._gradient_averager.average_backward(pending, **options)
            self.accumulation.record_reduction(pending)
            pending.finish()
            self._store.end_backward(pending.without_gradient)


_WAITING = ("threading", "concurrent", "queue", "multiprocessing", "asyncio", "selectors", "socket")
"""Packages of Python with functions in which a thread waits for another thread."""


class TrainingThreads:
    """Refuses backwards in two threads that run at once; threads that wait for each other may take turns.

    Ranks exchange gradients in the order of their backwards, which differs between ranks if threads race.
    """

    def __init__(self) -> None:
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._last = 0

    def check(self) -> None:
        """Record that this thread runs a backward.

        Raises:
            DivergenceError: if another thread that has run a backward is at work now.
        """
        if threading.get_ident() == self._last:
            return
        here = threading.current_thread()
        if isinstance(here, threading._DummyThread):  # a thread of autograd, in which a checkpoint runs a backward
            return
        others = [one for one in self._threads if one is not here and one.is_alive() and not _waits(one)]
        self._threads.add(here)
        self._last = threading.get_ident()
        if others:
            raise DivergenceError(_AT_ONCE.format(one=here.name, other=others[0].name))


def _waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in _WAITING


_AT_ONCE = (
    "two threads of the program train at the same time ({one} and {other}); ranks would exchange their gradients in "
    "another order each. Train one after the other, or run them as trials of a search"
)
