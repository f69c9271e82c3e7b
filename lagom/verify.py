"""``verify=True``: the run is rehearsed in one process and on the ranks, and compared, before it may begin."""

from __future__ import annotations

import dataclasses
import html
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagom.agreement import Level, Row, compare, level
from lagom.config.torch_distributed import Batches, Evaluation
from lagom.errors import VerificationError
from lagom.launchers.protocol import Launcher
from lagom.plan import Plan, Rehearsal
from lagom.record import Record

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
    if found.verdict not in ("agrees", "unsteady"):
        others = (other for other in _alternatives(plan) if rehearsals.judge(other).verdict == "agrees")
    right = next(others, None)
    verification = Verification(
        name=plan.name,
        setting=_named(plan, plan),
        where=launcher.where(),
        world_size=plan.world_size,
        rows=found.rows,
        verdict=found.verdict,
        told=_told(found, right and _named(right, plan), plan),
        seconds=time.monotonic() - started,
    )
    if not verification.may_run:
        raise VerificationError(str(verification))
    return verification


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What rehearsals showed; shows itself as a table."""

    name: str
    setting: str
    where: str
    world_size: int
    rows: Sequence[Row]
    verdict: str
    """"agrees"; "random", but for random numbers of the ranks' own; "own", but for numbers that the program shows;
    "differs"; "unsteady", already between two runs of one process; "fails", on the ranks."""
    told: str
    seconds: float

    @property
    def may_run(self) -> bool:
        """Whether the run is one to start: training is that of one process, as far as the rehearsal can tell."""
        return self.verdict in ("agrees", "random", "own")

    def __str__(self) -> str:
        cells = [self._head(), *(line for row in self._shown() for line in _wrapped(self._cells(row)))]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        told = textwrap.wrap(self.told, _WIDTH, break_long_words=False, break_on_hyphens=False)
        return "\n".join([self._title(), *("  " + line for line in lines), *told])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            told = "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{told}</tr>"

        rows = "".join(line(self._cells(row), "td") for row in self._shown())
        return (
            f"<table><caption style='text-align:left'><b>{html.escape(self._title())}</b></caption>"
            f"<thead>{line(self._head(), 'th')}</thead><tbody>{rows}</tbody></table>"
            f"<p>{html.escape(self.told)}</p>"
        )

    def _shown(self) -> list[Row]:
        return [row for row in self.rows if row.note or row.level > Level.UNKNOWN or row.one != row.ranks]

    def _title(self) -> str:
        return f"{self.name}, rehearsed on {self.where} in {self.seconds:.1f} s"

    def _head(self) -> list[str]:
        other = "the same again" if self.verdict == "unsteady" else f"{self.world_size} ranks, {self.setting}"
        return ["", "one process", other, "verdict"]

    def _cells(self, row: Row) -> list[str]:
        verdict = _SIGNS[row.level] + (": " if _SIGNS[row.level] and row.note else "") + row.note
        return [row.what, row.one, row.ranks, verdict]


_WIDTH = 118


def _wrapped(cells: list[str]) -> Iterator[list[str]]:
    """The line, and lines below it for what does not fit the last column."""
    parts = textwrap.wrap(cells[3], 56, break_long_words=False) or [""]
    yield [*cells[:3], parts[0]]
    for part in parts[1:]:
        yield ["", "", "", part]


_SIGNS = {Level.UNKNOWN: "", Level.AGREES: "agrees", Level.OWN: "DIFFERS", Level.DIFFERS: "DIFFERS"}


def show(verification: Verification) -> None:
    """In a notebook as a table; elsewhere on standard error, beside the progress of the run."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        ipython.display.display(verification)
    else:
        sys.stderr.write(f"lagom: {verification}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _Finding:
    verdict: str
    rows: Sequence[Row]


class _Rehearsals:
    """Rehearses, and remembers what one process did."""

    def __init__(self, launcher: Launcher, plan: Plan, call: Mapping[str, Any]) -> None:
        self._launcher = launcher
        self._plan = plan
        self._call = call
        self._known: dict[Rehearsal, Record] = {}

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
        # The ranks take as many steps as one process did before its time was over.
        steps = max(1, len(one.steps)) if not one.returned and not one.error else rehearsal.num_backwards
        ranks = self._run(plan, dataclasses.replace(rehearsal, num_backwards=steps))
        if isinstance(ranks, str):
            if one.error and ranks.endswith(one.error):
                return _Finding("agrees", [Row("ends with", one.error, one.error, Level.AGREES)])
            rows = [Row("ends with", one.error or "no error", "an error", Level.DIFFERS, ranks)]
            if self._is_unsteady(rehearsal, one):
                return _Finding("unsteady", compare(one, [self._one(rehearsal, again=True)]))
            return _Finding("fails", rows)
        rows = compare(one, ranks)
        if level(rows) > Level.AGREES:
            again = self._one(rehearsal, again=True)
            if level(compare(one, [again])) >= Level.DIFFERS:
                return _Finding("unsteady", compare(one, [again]))
            rows = compare(one, ranks, again)
        return _Finding(_VERDICTS[level(rows)], rows)

    def _is_unsteady(self, rehearsal: Rehearsal, one: Record) -> bool:
        return level(compare(one, [self._one(rehearsal, again=True)])) >= Level.DIFFERS

    def _one(self, rehearsal: Rehearsal, *, again: bool = False) -> Record:
        if rehearsal in self._known and not again:
            return self._known[rehearsal]
        plan = dataclasses.replace(self._plan, world_size=1, ranks_per_slot=1)
        limited = dataclasses.replace(rehearsal, seconds=_PATIENCE_S)
        if again:
            # Not by the clock: it is to end where the first one did.
            first = self._known[rehearsal]
            steps = max(1, len(first.steps)) if not first.returned else rehearsal.num_backwards
            limited = dataclasses.replace(rehearsal, num_backwards=steps)
        records = self._run(plan, limited)
        record = Record(error=records) if isinstance(records, str) else records[0]
        if not again:
            self._known[rehearsal] = record
        return record

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


def _told(found: _Finding, right: str | None, plan: Plan) -> str:
    """One sentence: what to do."""
    instead = f"with {right} it agrees" if right else "no other setting agrees either"
    if found.verdict == "agrees":
        if any(row.what == "work" and row.ranks == "not shared out" for row in found.rows):
            return f"Right, but no faster than one process: every rank does all the work. {_faster(plan)}".rstrip()
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
    if right:
        return f"This program needs {right}: with it, the ranks do what one process does."
    return (
        "This program cannot be distributed faithfully: no setting gives what one process gives. "
        "Run it with world_size=1."
    )


def _faster(plan: Plan) -> str:
    return "" if plan.batches == "whole" else "batches='whole' shares out the forwards."


# Note [Rehearsals]
#
# A rehearsal is an ordinary run with its passes over loaders cut short and its program ended after a few backwards,
# by an exception of lagom's; what it prints and writes goes nowhere. The judge is the same with one rank, where no
# patch changes a number. Both see the same first batches and the same last one, which may be uneven.
#
# Compared are the losses, the gradients after each backward and how far parameters moved (against which
# their difference is measured: a rate of 1e-5 hides every mistake in the parameters themselves). Gradients tell what
# Adam hides, a wrong scale. The tolerance grows from step to step, as rounding errors do.
#
# Where split disagrees, both are rehearsed once more with dropout off and a sample's random numbers fixed by its
# index: ranks draw their own there, so that they differ, and that is no mistake. Where anything disagrees, one process
# is rehearsed a second time: a program that does not repeat itself can agree with nothing. And the other
# settings are tried, so that what is named as right has been seen to be.
