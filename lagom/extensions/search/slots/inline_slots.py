"""``InlineSlots``: the one slot of a search that runs in this process, for a debugger."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lagom.control_groups import available_cores
from lagom.errors import PayloadError
from lagom.extensions.search.on_rank.messages import (
    OutcomePart,
    RunTrial,
    SlotJoin,
    TrialAnswer,
    TrialEnded,
    TrialReport,
)
from lagom.plan import Plan
from lagom.program.payload import Parcel, unpack
from lagom.program.signature import Call
from lagom.wire.messages import LocalEvent, Message, RankReport


class InlineSlots:
    """Runs trials one after another in the calling thread; they write to the real disk."""

    def __init__(self, plan: Plan, call: Call) -> None:
        self._plan = dataclasses.replace(plan, searches=True)
        self._call = call
        self._waiting: list[SlotJoin | RunTrial] = []
        self._answer = TrialAnswer(prune=False)

    def __enter__(self) -> InlineSlots:
        """Queue the slot's join message, which ``serve`` takes first."""
        self._waiting.append(
            SlotJoin(
                task=0,
                pid=os.getpid(),
                ranks=[0],
                host="this process",
                ip="",
                store=None,
                python="",
                torch="",
                gpus=[],
                cores=available_cores(),
                sees_driver=True,
            )
        )
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: no trial is left."""

    def send(self, slot: int, message: Message) -> None:
        """Keep a trial for ``serve``, or the answer for the trial that runs."""
        if isinstance(message, RunTrial):
            self._waiting.append(message)
        elif isinstance(message, TrialAnswer):
            self._answer = message

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        """Pass on the join message, or run the trial that was sent, if any; see ``TrialSlots.serve``."""
        for message in [self._waiting.pop(0)] if self._waiting else []:
            if isinstance(message, RunTrial):
                self._run(message, take)
            else:
                take(0, message)

    def release(self, slot: int) -> bool:
        """Return False: nobody else can use this process."""
        return False

    def over(self) -> None:
        """Do nothing: no trial is left."""

    def _run(self, message: RunTrial, take: Callable[[int, Message | LocalEvent], None]) -> None:
        from lagom.extensions.search.on_rank.trial import Trial, TrialPruned, metric_of
        from lagom.on_rank import bootstrap
        from lagom.world import Place

        def ask(report: Message) -> TrialAnswer:
            take(0, report)
            return self._answer

        trial = Trial(ask, message.metric)

        def attach(session: Any) -> None:
            session.parts["search"] = trial

        started, outcome = time.monotonic(), dict[str, Any]()
        change = unpack(base64.b64decode(message.change))
        try:
            with tempfile.TemporaryDirectory(prefix="lagom-") as folder:
                outcome = bootstrap.run(self._plan, Place(), lambda: change(self._call), Path(folder), attach=attach)
            metric = metric_of(outcome["value"], trial.metric, trial.logged)
            report: RankReport = TrialReport(rank=0, ok=True, metric=metric, samples=outcome["samples"])
        except TrialPruned:
            report = TrialReport(rank=0, ok=True, pruned=True)
        except Exception as error:
            outcome = {"error": error}
            trace = "".join(traceback.format_exception(error))
            report = RankReport(rank=0, ok=False, error=type(error).__name__, message=str(error), traceback=trace)
        with contextlib.suppress(PayloadError):
            data = base64.b64encode(Parcel(outcome).tobytes()).decode()
            take(0, OutcomePart(name="outcome", data=data))
        take(0, TrialEnded(reports=[report], seconds=time.monotonic() - started, problems=[]))
