"""``run_attempts``: runs a call, and runs it again after the loss of a rank, an executor or a host.

Note [Files of a lost attempt] in restart/prepared_files.py says which files a new attempt finds.
"""

from __future__ import annotations

import dataclasses
import sys

from lagom.call import Call
from lagom.errors import LagomError, SnapshotError
from lagom.launchers.failure import raise_failure
from lagom.launchers.protocol import Launcher, Outcome
from lagom.plan import Plan
from lagom.records.run_dir import RunRecords
from lagom.restart.history import Failure, RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.restart.losses import Loss, loss_in
from lagom.restart.prepared_files import put_back, remove_siblings


def run_attempts(
    launcher: Launcher,
    plan: Plan,
    call: Call,
    records: RunRecords | None = None,
    snapshots: SnapshotFolder | None = None,
) -> tuple[list[Outcome], list[Failure]]:
    """Run ``call`` under ``plan``, again after up to ``max_failures`` losses; return the last outcomes and all losses.

    Raises:
        Exception: as ``raise_failure`` and ``Launcher.run``; after a loss only when no attempt is left.
    """
    changed = records.lost if records is not None else lambda _: None
    history = RunHistory(plan.config.max_failures, changed, snapshots)
    if history.resumed is not None:
        say(f"the run goes on from {history.resumed.place}", plan, records)
        if records is not None:
            records.goes_on(history.resumed.place)
    now = plan
    try:
        while isinstance(found := _run_once(launcher, now, call, records, history), LagomError):
            if isinstance(found, SnapshotError) and history.resumed is not None:
                if not history.failures:
                    raise found  # the user resumes a run, perhaps on the wrong machine: keep the snapshots
                say(f"{found}: the run begins again from the beginning", plan, records)
                history.give_up_snapshots()
                continue
            if history.loss is None or plan.config.max_failures == 0:
                raise found
            now = _next(launcher, plan, history, history.loss, found, records)
        return found, history.failures
    finally:
        remove_siblings(history.files)


def _run_once(
    launcher: Launcher, plan: Plan, call: Call, records: RunRecords | None, history: RunHistory
) -> list[Outcome] | LagomError:
    """Return the outcomes of an attempt without failures; else its error, with a loss, if any, in ``history.loss``."""
    try:
        outcomes = launcher.run(plan, call, records, history)
        reports = [outcome.report for outcome in outcomes if not outcome.report["ok"]]
        history.loss = history.loss or loss_in(reports, {})
        raise_failure(outcomes)
    except LagomError as error:
        return error
    return outcomes


def _next(
    launcher: Launcher, plan: Plan, history: RunHistory, loss: Loss, error: LagomError, records: RunRecords | None
) -> Plan:
    """Return the plan of the attempt after ``loss``.

    Raises:
        LagomError: ``error``, if no further attempt is allowed or there are too few slots.
    """
    history.fail(loss)
    if len(history.failures) > plan.config.max_failures:
        put_back(history.files)
        raise _counted(error, history, f"max_failures={plan.config.max_failures}") from error.__cause__
    slots = launcher.slots_again(plan.num_slots, loss)
    size = min(plan.world_size, slots * plan.ranks_per_slot)
    if size < _least(plan):
        put_back(history.files)
        raise _counted(error, history, _too_few(plan, size)) from error.__cause__
    now = dataclasses.replace(plan, world_size=size)
    say(_announced(loss, history, now, plan), plan, records)
    if records is not None:
        records.begin_again(now.world_size)
    return now


def say(text: str, plan: Plan, records: RunRecords | None) -> None:
    """Tell the user ``text``, and record it."""
    sys.stderr.write(f"lagom: {plan.name}: {text}\n")
    sys.stderr.flush()
    if records is not None:
        records.said(f"lagom: {plan.name}: {text}")


def _least(plan: Plan) -> int:
    """Return the fewest ranks with which the run may begin again."""
    least, config = plan.config.min_world_size, plan.config
    if least is not None:
        return min(least, plan.world_size)
    # In these three modes the global batch or the learning rate depends on the number of ranks: with fewer ranks the
    # training would be a different one.
    return plan.world_size if plan.already_distributed or config.batches == "per_rank" or config.lr_scaling else 1


def _too_few(plan: Plan, size: int) -> str:
    why = f"min_world_size={plan.config.min_world_size}"
    if plan.config.min_world_size is None:
        why = "with another number of ranks the global batch would change; set min_world_size to allow that"
        why = why if size else "no executor is left"
    return f"there is room for {size} of its {plan.world_size} ranks: {why}"


def _counted(error: LagomError, history: RunHistory, why: str) -> LagomError:
    num = len(history.failures)
    error.args = (f"{error} (the run was started {num} time{'s' * (num != 1)}: {why})", *error.args[1:])
    return error


def _announced(loss: Loss, history: RunHistory, now: Plan, plan: Plan) -> str:
    where = f" (on {loss.host})" if loss.host and loss.host not in loss.cause else ""
    number = f"attempt {history.num_attempts} of {plan.config.max_failures + 1}"
    does = "begins again" if history.resumed is None else f"goes on from {history.resumed.place}"
    text = f"{loss.cause}{where}; the run {does}, {number}"
    if now.world_size != plan.world_size:
        ranks = "1 rank" if now.world_size == 1 else f"{now.world_size} ranks"
        text += f", with {ranks} instead of {plan.world_size}"
        if plan.config.batches == "per_rank":
            text += ": the global batch is smaller by as much"
    return text
