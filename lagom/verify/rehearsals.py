"""``verify=True``: the run is rehearsed in one process and on the ranks, and compared, before it may begin."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagom.config.torch_distributed import Batches, Evaluation
from lagom.errors import VerificationError
from lagom.launchers.protocol import Launcher
from lagom.plan import Plan, Rehearsal
from lagom.verify.agreement import Level, Row, compare, level
from lagom.verify.record import Record
from lagom.verify.verification import Verification

_PATIENCE_S = 10.0
"""After so long in one process no more backward is begun."""


def verify(launcher: Launcher, plan: Plan, call: Mapping[str, Any]) -> Verification:
    """Rehearse ``call`` in one process and as ``plan`` says, and other ways where the two do not agree.

    See Note [Rehearsals].

    Raises:
        VerificationError: when the run as planned would not give what one process gives, saying what would.
    """
    started = time.monotonic()
    rehearsals = _Rehearsals(launcher, plan, call)
    found = rehearsals.judge(plan)
    others: Iterator[Plan] = iter(())
    if found.verdict not in ("agrees", "unsteady", "unlike"):
        others = (other for other in _alternatives(plan) if rehearsals.judge(other).verdict == "agrees")
    elif found.verdict == "agrees" and not found.is_shared and plan.batches != "whole":
        whole = dataclasses.replace(plan, batches="whole")
        faster = rehearsals.judge(whole)
        others = iter([whole] if faster.verdict == "agrees" and faster.is_shared else [])
    better = next(others, None)
    verification = Verification(
        name=plan.name,
        setting=_named(plan, plan),
        where=launcher.where(),
        world_size=plan.world_size,
        rows=found.rows,
        verdict=found.verdict,
        told=_told(found, None if better is None else _named(better, plan)),
        seconds=time.monotonic() - started,
    )
    if not verification.may_run:
        raise VerificationError(str(verification))
    return verification


@dataclass(frozen=True, slots=True)
class _Finding:
    verdict: str
    rows: Sequence[Row]

    @property
    def is_shared(self) -> bool:
        """Whether the ranks do different work."""
        return all(row.ranks == "shared out" for row in self.rows if row.what == "work")


class _Rehearsals:
    """Rehearses, and remembers what one process did."""

    def __init__(self, launcher: Launcher, plan: Plan, call: Mapping[str, Any]) -> None:
        self._launcher = launcher
        self._plan = plan
        self._call = call
        self._known: dict[tuple[Rehearsal, bool], Record] = {}

    def judge(self, plan: Plan) -> _Finding:
        """Whether the run that ``plan`` describes would give what one process gives."""
        finding = self._compared(plan, pinned=False)
        if finding.verdict == "differs" and plan.batches != "whole":
            # Dropout and augmentation draw other numbers on each rank, of the same distribution.
            pinned = self._compared(plan, pinned=True)
            if pinned.verdict in ("agrees", "own"):
                return dataclasses.replace(pinned, verdict="random")
        return finding

    def _compared(self, plan: Plan, *, pinned: bool) -> _Finding:
        group = plan.world_size if plan.batches == "per_rank" else 1
        rehearsal = Rehearsal(group_size=group, pinned=pinned)
        one = self._one(rehearsal)
        ranks = self._run(
            plan,
            dataclasses.replace(
                rehearsal, num_backwards=_num_steps(one, rehearsal), expected=one.error.partition(":")[0]
            ),
        )
        if isinstance(ranks, str):
            rows = [Row("ends with", one.error or "no error", "an error", Level.DIFFERS, ranks)]
            again = self._one(rehearsal, again=True)
            if level(repeated := compare(one, [again], again)) >= Level.DIFFERS:
                return _Finding("unsteady", repeated)
            return _Finding("fails", rows)
        rows = compare(one, ranks)
        if any(rank.shards_itself for rank in ranks):
            return _Finding("unlike", rows)
        if level(rows) > Level.AGREES:
            again = self._one(rehearsal, again=True)
            if level(repeated := compare(one, [again], again)) >= Level.DIFFERS:
                return _Finding("unsteady", repeated)
            rows = compare(one, ranks, again)
        return _Finding(_VERDICTS[level(rows)], rows)

    def _one(self, rehearsal: Rehearsal, *, again: bool = False) -> Record:
        """What one process does; with ``again``, the second time."""
        if (rehearsal, again) not in self._known:
            limited = dataclasses.replace(rehearsal, seconds=_PATIENCE_S)
            if again:
                # Not by the clock: it is to end where the first one did.
                limited = dataclasses.replace(rehearsal, num_backwards=_num_steps(self._one(rehearsal), rehearsal))
            records = self._run(dataclasses.replace(self._plan, world_size=1), limited)
            self._known[rehearsal, again] = Record(error=records) if isinstance(records, str) else records[0]
        return self._known[rehearsal, again]

    def _run(self, plan: Plan, rehearsal: Rehearsal) -> list[Record] | str:
        """The records of all ranks, or why there are none."""
        outcomes = self._launcher.run(dataclasses.replace(plan, rehearsal=rehearsal), self._call)
        failed = [outcome.report for outcome in outcomes if not outcome.report["ok"]]
        if failed:
            first = min(failed, key=lambda report: (bool(report.get("consequence")), report.get("order", 0)))
            if "died" in first or "error" not in first:
                return str(first.get("message", "a rank was stopped"))
            return f"{first['error']}: {first['message']}"
        records: list[Record] = [outcome.load()["value"] for outcome in outcomes]
        return records


def _num_steps(one: Record, rehearsal: Rehearsal) -> int:
    """The backwards that one process ran before its time was over."""
    ended = one.returned or one.error
    return rehearsal.num_backwards if ended else max(1, len(one.steps))


_VERDICTS = {Level.UNKNOWN: "agrees", Level.AGREES: "agrees", Level.OWN: "own", Level.DIFFERS: "differs"}


def _alternatives(plan: Plan) -> Iterator[Plan]:
    """Other settings, the one that changes least first."""
    safe = "gathered" if plan.evaluation == "sharded" else plan.evaluation
    ways: list[tuple[Batches, Evaluation]] = [(plan.batches, safe), ("whole", safe), ("split", safe)]
    ways += [(batches, "replicated") for batches in dict.fromkeys((plan.batches, "whole", "split"))]
    for batches, evaluation in dict.fromkeys(ways):
        if (batches, evaluation) != (plan.batches, plan.evaluation):
            yield dataclasses.replace(plan, batches=batches, evaluation=evaluation)


def _named(plan: Plan, asked: Plan) -> str:
    """The setting, as one writes it."""
    parts = (
        [f"batches={plan.batches!r}"] if plan.batches != asked.batches or plan.evaluation == asked.evaluation else []
    )
    return ", ".join(parts + ([f"evaluation={plan.evaluation!r}"] if plan.evaluation != asked.evaluation else []))


def _told(found: _Finding, right: str | None) -> str:
    """One sentence: what to do."""
    instead = f"with {right} it agrees" if right else "no other setting agrees either"
    if found.verdict == "agrees":
        if not found.is_shared:
            faster = f"{right} shares it out." if right else ""
            return f"Right, but no faster than one process: every rank does all the work. {faster}".rstrip()
        return "The ranks do what one process does."
    if found.verdict == "random":
        return (
            "The ranks do what one process does, with dropout off and a sample's random numbers fixed by its index; "
            f"otherwise each rank draws its own. For the very numbers of one process: {instead}."
        )
    if found.verdict == "own":
        return (
            "Training is that of one process, but numbers that the program shows are those of a rank's own share: "
            f"right as long as it does no more with them; {instead}."
        )
    if found.verdict == "unsteady":
        return (
            "Two runs of one process already differ from each other, so there is nothing to compare with: "
            "start every generator of the program's own from a fixed seed, or leave out verify=True."
        )
    if found.verdict == "unlike":
        return (
            "A data set of this program shards itself (lagom_sharded), so that each rank has batches that one process "
            "never has: what differs may be right, and is for you to judge."
        )
    if right:
        return f"This program needs {right}: with it, the ranks do what one process does."
    return (
        "This program cannot be distributed faithfully: no setting gives what one process gives. "
        "Run it with world_size=1."
    )


# Note [Rehearsals]
#
# A rehearsal is an ordinary run with its passes over loaders cut short and its program ended after a few backwards,
# by an exception of lagom's; what it prints goes nowhere, and what it writes to a disk of the rank's own. The judge is
# the same with one rank, where no patch changes a number. Both see the same first batches and the same last one, which
# may be uneven.
#
# Compared are the losses, the gradients after each backward and how far parameters moved (against which
# their difference is measured: a rate of 1e-5 hides every mistake in the parameters themselves). Gradients tell what
# Adam hides, a wrong scale. The tolerance grows from step to step, as rounding errors do.
#
# Where split disagrees, both are rehearsed once more with dropout off and a sample's random numbers fixed by its
# index: ranks draw their own there, so that they differ, and that is no mistake. Where anything disagrees, one process
# is rehearsed a second time: a program that does not repeat itself can agree with nothing. And the other
# settings are tried, so that what is named as right has been seen to be.
