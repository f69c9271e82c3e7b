"""``verify``: rehearses the run in one process and on the ranks, and compares them before the run begins."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lagom.config.torch_distributed import Batches, Evaluation
from lagom.driver.protocol import Launcher
from lagom.errors import SnapshotError, VerificationError
from lagom.extensions.verify.advice import advise
from lagom.extensions.verify.agreement import agreement_level, compare, compare_rounding, is_rounded
from lagom.extensions.verify.comparison_row import AgreementLevel, ComparisonRow
from lagom.extensions.verify.on_rank.record import Record
from lagom.extensions.verify.resumption import (
    compare_resumed,
    snapshot_after,
    snapshot_folder,
    without_rehearsal,
    without_snapshot,
)
from lagom.extensions.verify.verification import Verification
from lagom.plan import Plan, Rehearsal
from lagom.program.signature import Call
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder

_PATIENCE_S = 30.0
"""Seconds after which a rehearsal of one process ends early, after 8 or 24 backwards, so that fewer are compared."""


def verify(launcher: Launcher, plan: Plan, call: Call) -> Verification:
    """Rehearse ``call`` in one process and under ``plan``, and under other plans if these two do not agree.

    See Note [Rehearsals].

    Raises:
        VerificationError: when the run may not start, as a rule because it would not give the results of one process;
            names a setting that would, if one was found.
        PlanError: when snapshots are asked for, and the run has no folder.
    """
    started = time.monotonic()
    with snapshot_folder(plan, call) as snapshots:
        rehearsals = _Rehearsals(launcher, plan, call, snapshots)
        judged = rehearsals.judge(plan)
        better = next((other for other in _others(plan, judged) if _is_better(rehearsals.judge(other), judged)), None)
        may_run = _may_run(plan, judged, better)
        if may_run and snapshots is not None:
            judged = rehearsals.rehearse_restart(judged)
    verification = Verification(
        name=plan.name,
        setting=_named(plan, plan),
        where=launcher.where(),
        world_size=plan.world_size,
        rows=judged.rows,
        verdict=judged.verdict,
        may_run=may_run and judged.verdict != "strays",
        told=advise(judged.verdict, judged.rows, None if better is None else _named(better, plan), judged.is_shared),
        seconds=time.monotonic() - started,
    )
    if not verification.may_run:
        raise VerificationError(str(verification))
    return verification


@dataclass(frozen=True, slots=True)
class _Finding:
    verdict: str
    rows: Sequence[ComparisonRow]

    @property
    def is_shared(self) -> bool:
        """Whether the ranks do different work."""
        return all(row.ranks == "split" for row in self.rows if row.what == "work")


def _others(plan: Plan, found: _Finding) -> Iterator[Plan]:
    """Yield other plans to rehearse: if this plan agreed, one that may be faster; if not, plans that may agree."""
    if found.verdict in ("random", "own") and plan.config.batches == "per_rank":
        # Another value of ``batches`` would change the global batch, and so the training.
        yield from (other for other in _alternatives(plan) if other.config.batches == "per_rank")
    elif found.verdict in ("random", "own", "differs", "fails"):
        yield from _alternatives(plan)
    elif found.verdict == "agrees" and plan.config.batches == "whole":
        yield plan.with_config(batches="split")
    elif found.verdict == "agrees" and not found.is_shared:
        yield plan.with_config(batches="whole")


def _is_better(other: _Finding, found: _Finding) -> bool:
    if found.verdict == "agrees":
        return other.verdict == "agrees" and other.is_shared
    return other.verdict in ("agrees", "raises")


def _may_run(plan: Plan, found: _Finding, better: Plan | None) -> bool:
    """Return whether to start the run.

    Differences by the ranks' own random numbers or shares are accepted with "per_rank"; else only if no better setting
    was found and the printed texts agree.
    """
    if found.verdict in ("random", "own"):
        is_shown = any(row.what == "printed" and row.level > AgreementLevel.AGREES for row in found.rows)
        return plan.config.batches == "per_rank" or (better is None and not is_shown)
    return found.verdict in ("agrees", "raises", "unlike")


class _Rehearsals:
    """Runs rehearsals, and caches the records of one process."""

    def __init__(self, launcher: Launcher, plan: Plan, call: Call, snapshots: SnapshotFolder | str | None) -> None:
        self._launcher = launcher
        self._plan = plan
        self._call = call
        self._snapshots = snapshots
        self._planned: tuple[Rehearsal, list[Record]] | None = None
        """The rehearsal of the plan itself, in which a snapshot is taken."""
        self._known: dict[tuple[Rehearsal, bool], Record] = {}

    def judge(self, plan: Plan) -> _Finding:
        """Find out whether the run that ``plan`` describes would give the results of one process."""
        finding = self._compared(plan, pinned=False)
        if finding.verdict == "differs" and plan.config.batches != "whole":
            # Dropout and augmentation draw other numbers on each rank, which is no mistake: compare without them.
            pinned = self._compared(plan, pinned=True)
            if pinned.verdict in ("agrees", "own"):
                return dataclasses.replace(pinned, verdict="random")
        return finding

    def _compared(self, plan: Plan, *, pinned: bool) -> _Finding:
        group = plan.world_size if plan.config.batches == "per_rank" else 1
        rehearsal = Rehearsal(group_size=group, pinned=pinned)
        reference = self._one(rehearsal)
        limits = dataclasses.replace(
            rehearsal, num_backwards=_num_steps(reference, rehearsal), expected=reference.error.partition(":")[0]
        )
        if plan is self._plan and isinstance(self._snapshots, SnapshotFolder):
            ranks = self._run(
                plan, dataclasses.replace(limits, snapshot_after=snapshot_after(reference)), self._snapshots
            )
            self._planned = None if isinstance(ranks, str) else (limits, ranks)
        else:
            ranks = self._run(plan, limits)
        if reference.died:
            row = ComparisonRow(
                "ends with", reference.error, "an error" if isinstance(ranks, str) else "", AgreementLevel.DIFFERS
            )
            return _Finding("dies", [row])
        if isinstance(ranks, str):
            rows = [
                ComparisonRow("ends with", reference.error or "no error", "an error", AgreementLevel.DIFFERS, ranks)
            ]
            again = self._one(rehearsal, again=True)
            if agreement_level(repeated := compare(reference, [again], again)) >= AgreementLevel.DIFFERS:
                return _Finding("unsteady", repeated)
            return _Finding("fails", rows)
        rows = compare(reference, ranks)
        if any(rank.shards_itself for rank in ranks):
            return _Finding("unlike", rows)
        if agreement_level(rows) > AgreementLevel.AGREES:
            again = self._one(rehearsal, again=True)
            if agreement_level(repeated := compare(reference, [again], again)) >= AgreementLevel.DIFFERS:
                return _Finding("unsteady", repeated)
            rows = compare(reference, ranks, again)
        verdict = _VERDICTS[agreement_level(rows)]
        if verdict == "agrees" and plan.config.batches == "whole" and is_rounded(reference, ranks):
            rows = [*rows, *self._rounding(plan, reference, ranks, limits)]
        return _Finding("raises" if reference.error and verdict == "agrees" else verdict, rows)

    def _rounding(
        self, plan: Plan, reference: Record, ranks: Sequence[Record], limits: Rehearsal
    ) -> Sequence[ComparisonRow]:
        """Return the row that shows whether rounding alone explains the ranks' differences; none if it cannot run."""
        alone = dataclasses.replace(plan, world_size=1)
        if plan.config.backend == "torch" and plan.config.micro_batches is None:
            alone = alone.with_config(micro_batches=2)
        control = self._run(alone, dataclasses.replace(limits, other_threads=True, snapshot_after=None))
        return () if isinstance(control, str) else (compare_rounding(reference, ranks, control[0]),)

    def rehearse_restart(self, found: _Finding) -> _Finding:
        """Rehearse that the plan's run continues from a snapshot; return ``found`` with the comparison's row."""
        row = self._resumed()
        verdict = "strays" if row.level > AgreementLevel.AGREES else found.verdict
        return _Finding(verdict, [*found.rows, row])

    def _resumed(self) -> ComparisonRow:
        if not isinstance(self._snapshots, SnapshotFolder):
            return without_snapshot(str(self._snapshots))
        assert self._planned is not None
        limits, whole = self._planned
        if (snapshot := self._snapshots.newest()) is None:
            why = whole[0].without_snapshot
            return without_snapshot(why) if why else without_rehearsal(whole[0])
        limits = dataclasses.replace(limits, num_before=whole[0].num_before)
        resumed = self._run(self._plan, limits, self._snapshots)
        if isinstance(resumed, str):
            if resumed.startswith(f"{SnapshotError.__name__}: "):
                return without_snapshot(resumed.partition(": ")[2])
            note = f"the program continues differently: it ends with {resumed}"
            return ComparisonRow("snapshot", "", snapshot.place, AgreementLevel.DIFFERS, note)
        row = compare_resumed(whole, resumed, snapshot.place)
        if row.level > AgreementLevel.AGREES:
            again = self._one(Rehearsal(), again=True)
            row = compare_resumed(whole, resumed, snapshot.place, again)
        return row

    def _one(self, rehearsal: Rehearsal, *, again: bool = False) -> Record:
        """Return the record of one process; with ``again``, of its second run."""
        if (rehearsal, again) not in self._known:
            limited = dataclasses.replace(rehearsal, seconds=_PATIENCE_S)
            if again:
                # No time limit: the second run must end where the first run did.
                num_backwards = _num_steps(self._one(rehearsal), rehearsal)
                limited = dataclasses.replace(rehearsal, num_backwards=num_backwards, jumps=True)
            records = self._run(dataclasses.replace(self._plan, world_size=1), limited)
            self._known[rehearsal, again] = Record(error=records, died=True) if isinstance(records, str) else records[0]
        return self._known[rehearsal, again]

    def _run(self, plan: Plan, rehearsal: Rehearsal, snapshots: SnapshotFolder | None = None) -> list[Record] | str:
        """Return the records of all ranks, or the reason why there are none; go on from a snapshot if there is one."""
        history = None if snapshots is None else RunHistory(snapshots=snapshots)
        outcomes = self._launcher.run(dataclasses.replace(plan, rehearsal=rehearsal), self._call, history=history)
        failed = [outcome.report for outcome in outcomes if not outcome.report.ok]
        if failed:
            first = min(failed, key=lambda report: (report.consequence, report.order))
            if first.died or not first.error:
                return first.message or "a rank was stopped"
            return f"{first.error}: {first.message}"
        records: list[Record] = [outcome.load()["value"] for outcome in outcomes]
        return records


def _num_steps(one: Record, rehearsal: Rehearsal) -> int:
    """Return the limit of backwards for other runs: as many as one process ran, if the time limit has ended it."""
    ended = one.returned or one.error
    return rehearsal.num_backwards if ended else max(1, len(one.steps))


_VERDICTS = {
    AgreementLevel.UNKNOWN: "agrees",
    AgreementLevel.AGREES: "agrees",
    AgreementLevel.OWN: "own",
    AgreementLevel.DIFFERS: "differs",
}


def _alternatives(plan: Plan) -> Iterator[Plan]:
    """Yield other settings, the one that changes least first."""
    safe = "gathered" if plan.config.evaluation == "sharded" else plan.config.evaluation
    ways: list[tuple[Batches, Evaluation]] = [(plan.config.batches, safe), ("whole", safe), ("split", safe)]
    ways += [(batches, "replicated") for batches in dict.fromkeys((plan.config.batches, "whole", "split"))]
    for batches, evaluation in dict.fromkeys(ways):
        if (batches, evaluation) != (plan.config.batches, plan.config.evaluation):
            yield plan.with_config(batches=batches, evaluation=evaluation)


def _named(plan: Plan, asked: Plan) -> str:
    """Return the setting, as a user writes it."""
    is_told = plan.config.batches != asked.config.batches or plan.config.evaluation == asked.config.evaluation
    parts = [f"batches={plan.config.batches!r}"] if is_told else []
    return ", ".join(
        parts
        + ([f"evaluation={plan.config.evaluation!r}"] if plan.config.evaluation != asked.config.evaluation else [])
    )


# Note [Rehearsals]
#
# A rehearsal is an ordinary run with short passes over loaders, ended after a few backwards by an exception of lagom's.
# Its prints go nowhere, and its files to a disk of the rank's own. The run of one process is the same with one rank,
# where no patch changes a number. Both see the same first batches and the same last one, which may be uneven.
#
# Losses, gradients after each backward, and the movement of the parameters are compared. The difference of parameters
# is taken relative to their movement: with a learning rate of 1e-5, a mistake hardly shows in the parameters
# themselves. Gradients show a wrong scale, which Adam hides. The tolerance grows from step to step, as rounding errors
# do.
#
# If ranks with other batches than "whole" disagree, one process and the ranks are rehearsed once more with dropout off
# and a sample's random numbers fixed by its index: ranks draw their own random numbers there, so a difference is no
# mistake. If anything disagrees, one process is rehearsed a second time, with clocks that jump. If the two runs of one
# process differ in training, there is nothing to compare with. Times that the program prints or returns are left out,
# even if two of its runs happen to take equally long. The other settings are rehearsed too, so that a setting is only
# recommended after a rehearsal.
#
# A run that keeps snapshots takes one in the rehearsal of its own setting, and new processes go on from this snapshot
# for the rest of that rehearsal. They go on with its record, too, so the whole of both rehearsals is compared: losses,
# gradients, texts and the result. Files that the program has written before the snapshot are kept with the snapshot,
# since each rehearsal has a disk of its own.
#
# How much is compared does not depend on how busy the machine is, except for programs that need half a minute for their
# first 8 backwards, or 24.
