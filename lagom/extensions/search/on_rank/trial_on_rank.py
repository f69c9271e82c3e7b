"""``wait_for_trial`` and ``trial_on_rank``: a rank that waits for a trial, and a rank that runs one."""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lagom.extensions.search.on_rank.messages import BeginTrial, TrialReport
from lagom.extensions.search.on_rank.reports import report_logged_values
from lagom.extensions.search.on_rank.trial import Trial, metric_of
from lagom.patching.importers import imported_after, newest_module
from lagom.program.payload import unpack
from lagom.program.sources import is_installed

if TYPE_CHECKING:
    from types import ModuleType

    from lagom.on_rank.rank_call import RankCall
    from lagom.session.session import Session
    from lagom.wire.messages import RankReport

_MAX_IMPORTS = 10_000  # most names of modules, which must fit into a frame


def wait_for_trial(rank_call: RankCall) -> None:
    """Wait for a trial from the host process, and adopt it. See Note [Ranks that wait] in trial_ranks.py."""
    newest = newest_module()
    while not isinstance(message := rank_call.wait(), BeginTrial):
        pass
    os.environ.update(message.env)
    rank_call.rank_spec = dataclasses.replace(
        rank_call.rank_spec,
        gpu=message.gpu,
        gpu_index=message.gpu_index,
        nccl=message.nccl,
        threads=message.threads,
    )
    trial = Trial(rank_call.ask, message.metric, message.number)
    change = base64.b64decode(message.change)
    rank_call.parts["search"] = trial
    rank_call.changes.append(lambda call: unpack(change)(call))

    def complete(report: RankReport, returned: Any) -> TrialReport:
        facts = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
        facts["imports"] = _installed_imports(newest)
        if report.ok and returned is None:
            facts["pruned"] = True
        elif report.ok:
            is_told = report.rank == 0 or returned["value"] is not None
            facts["metric"] = metric_of(returned["value"], trial.metric, trial.logged) if is_told else None
            facts["samples"] = returned["samples"]
        return TrialReport(**facts)

    rank_call.reports.append(complete)


@contextmanager
def trial_on_rank(session: Session) -> Iterator[None]:
    """Context manager of a rank that runs a trial: report what the program logs, and end it when the driver says so."""
    trial: Trial | None = session.parts.get("search")
    if trial is not None:
        session.seed_text = f" of trial {trial.number}"
        session.events.reported.subscribe(trial.report_by_reporter)
        session.events.patched.subscribe(lambda stack: stack.enter_context(report_logged_values(session, trial)))
    yield


def _installed_imports(newest: ModuleType) -> list[str]:
    """Return the names of lagom's and installed packages' modules imported after ``newest``, in order of import."""
    found = []
    for module in reversed(imported_after(newest)):
        name, path = getattr(module, "__name__", None), getattr(module, "__file__", None)
        if isinstance(name, str) and isinstance(path, str) and (name.startswith("lagom.") or is_installed(path)):
            found.append(name)
    return found[:_MAX_IMPORTS]
