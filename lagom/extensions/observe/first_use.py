"""Breakpoints and trackers on a rank; their code is imported when the program first uses them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom.patching.importers import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from types import ModuleType

    from lagom.extensions.observe.debugger.rank_debugger import RankDebugger
    from lagom.on_rank.rank_call import RankCall
    from lagom.session.session import Session

REFUSAL = "lagom.extensions.observe.debugger.refusal.refuse"
"""Value of PYTHONBREAKPOINT: a process that is spawned, not forked, knows ``refuse`` only from its environment."""


@contextmanager
def breakpoints_on_rank(rank_call: RankCall) -> Iterator[None]:
    """Let ``breakpoint()`` and ``pdb.set_trace()`` stop the rank for the person at the driver; unless
    PYTHONBREAKPOINT is set already.

    In processes that the rank starts anew, such as spawned workers, ``breakpoint()`` is an error.
    """
    breakpoints = rank_call.parts["observe"] = Breakpoints(rank_call)
    with ExitStack() as stack:

        def change(pdb: ModuleType) -> None:
            stack.enter_context(replaced(pdb, "set_trace", breakpoints.stop))

        if not os.environ.get("PYTHONBREAKPOINT"):
            os.environ["PYTHONBREAKPOINT"] = REFUSAL
            stack.callback(os.environ.pop, "PYTHONBREAKPOINT", None)
            stack.enter_context(replaced(sys, "breakpointhook", breakpoints.stop))
            stack.enter_context(on_import({"pdb": change}))
        yield


class Breakpoints:
    """The breakpoints of a rank, and the debugger that the first of them makes."""

    def __init__(self, rank_call: RankCall) -> None:
        self._rank_call, self._pid = rank_call, os.getpid()
        self._session: Session | None = None

    @functools.cached_property
    def debugger(self) -> RankDebugger:
        """The debugger of this rank."""
        from lagom.extensions.observe.debugger.rank_debugger import RankDebugger

        call = self._rank_call
        debugger = RankDebugger(call.spec.plan, call.rank_spec.rank, call.ask, call.tell, self._pid)
        debugger.session = self._session
        return debugger

    def join(self, session: Session) -> None:
        """Let the debugger know the rank's state; in a run that is debugged, stop where the function fails."""
        self._session = session
        plan = session.plan
        if plan.config.debug is not None and plan.rehearsal is None:
            session.events.function.add(self._examined)

    def stop(self, *_: object, header: str | None = None, **__: object) -> None:
        """Stop the caller if this is the rank to stop; replaces ``sys.breakpointhook`` and ``pdb.set_trace``.

        Raises:
            LagomError: as ``RankDebugger.stop``.
        """
        self.debugger.stop(sys._getframe(1), header)  # the last line here: pdb stops at the next line, in the caller

    def _examined(self, make: Callable[[], Callable[[], Any]], *_: object) -> Callable[[], Callable[[], Any]]:
        def examined() -> Callable[[], Any]:
            function = make()

            def call() -> Any:
                with self.debugger.post_mortem():
                    return function()

            return call

        return examined


@contextmanager
def trackers_on_rank(session: Session) -> Iterator[None]:
    """Context manager of a rank; a tracker's part of lagom is imported only if the program imports the tracker."""
    from lagom.disk.install import is_protected  # a host process, which imports this file, has no patches

    plan, distributed = session.plan, session.world_size > 1
    with ExitStack() as stack:

        def follow_mlflow(_: ModuleType | None = None) -> None:
            from lagom.extensions.observe.tracking.mlflow import log_once_to_mlflow

            end = stack.enter_context(log_once_to_mlflow(session))
            if distributed:
                session.events.returned.subscribe(end)

        def follow_wandb(_: ModuleType) -> None:
            from lagom.extensions.observe.tracking.wandb import log_once_to_wandb

            stack.enter_context(log_once_to_wandb(session))

        def follow_tensorboard(_: ModuleType) -> None:
            from lagom.extensions.observe.tracking.tensorboard import write_events_once

            if not is_followed:
                is_followed.append(True)
                stack.enter_context(write_events_once(session))

        is_followed: list[bool] = []
        changes: dict[str, Callable[[ModuleType], None]] = {}
        if session.resumption.is_resumable and plan.rehearsal is None:
            follow_mlflow()  # a snapshot may hold state of MLflow, which is set before the program imports it
        elif distributed or plan.searches:
            changes["mlflow"] = follow_mlflow
        if distributed:
            changes["wandb"] = follow_wandb
        if distributed or plan.rehearsal is not None or is_protected():
            changes |= dict.fromkeys(("tensorboard", "tensorboardX"), follow_tensorboard)
        stack.enter_context(on_import(changes))
        yield
