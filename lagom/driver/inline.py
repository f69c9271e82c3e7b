"""``InlineLauncher``: runs one rank in this process, so that a debugger stops in the user's code."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any

from lagom.cluster import Cluster, kind_of_device, visible_devices
from lagom.driver.protocol import Outcome
from lagom.errors import PlanError
from lagom.plan import Plan
from lagom.program.signature import Call
from lagom.restart.history import RunHistory
from lagom.watch.run_dir import RunRecords
from lagom.watch.spans import Spans
from lagom.wire.messages import RankReport


def _keep_timeline(spans: Spans, records: RunRecords) -> None:
    for block in spans.blocks():
        records.timed(block)


_running = threading.RLock()  # reentrant: a nested call is safe, as it undoes its patches before the outer one


class InlineLauncher:
    """Runs the only rank in this process; pickles nothing; then undoes all patches and changes of ``os.environ``."""

    def cluster(self) -> Cluster:
        """Return one slot, with a GPU or another accelerator if there is one."""
        devices = visible_devices()[:1]
        kind = kind_of_device(devices[0] if devices else None)
        return Cluster(launcher="inline", slots=1, gpus_per_slot=len(devices), device_kind=kind)

    def where(self) -> str:
        """Return the place where ranks run, as a text for the user."""
        return "this process"

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        """Return ``wanted``; there is no new attempt, since the loss of this process ends the caller too."""
        return wanted

    def free_slots(self, running: int, *, one_host: bool) -> int:
        """Return 0: a run never has fewer ranks than it was to have."""
        return 0

    def run(
        self, plan: Plan, call: Call, records: RunRecords | None = None, history: RunHistory | None = None
    ) -> list[Outcome]:
        """See ``Launcher.run``; an exception of the function is not caught, so that a debugger stops at it.

        Raises:
            PlanError: on a rank of a run on several ranks, or while another thread has an inline run.
        """
        from lagom.on_rank import bootstrap
        from lagom.world import Place, world_size

        if world_size() > 1:
            raise PlanError("launcher='inline' was asked for on a rank of another run; call the function itself there")
        if not _running.acquire(blocking=False):
            raise PlanError(
                "another thread of this process has a run with launcher='inline', which changes torch for the whole "
                "process; wait for it, or use launcher='local'"
            )
        if history is not None:
            history.ranks_began()
        with contextlib.ExitStack() as stack:
            stack.callback(_running.release)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lagom-"))

            def watch(session: Any) -> None:
                if session.spans is not None and records is not None:
                    stack.callback(_keep_timeline, session.spans, records)

            outcome = bootstrap.run(plan, Place(), lambda: call, Path(folder), attach=watch)
        return [Outcome(rank=0, report=RankReport(rank=0, ok=True), load=lambda: outcome)]
