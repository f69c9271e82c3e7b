"""``compare_resumed``: compares a rehearsal that continues from a snapshot with the rehearsal that took it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lagom.errors import PlanError
from lagom.extensions.registry import wanted
from lagom.extensions.verify.agreement import compare
from lagom.extensions.verify.comparison_row import AgreementLevel, ComparisonRow
from lagom.extensions.verify.on_rank.record import Record
from lagom.plan import Plan
from lagom.program.signature import Call
from lagom.restart.kept_snapshots import UNREHEARSED, SnapshotFolder
from lagom.watch.upload import is_url, on_disk

_LATEST = 13
"""Most backwards before the snapshot: in the second pass of 8 batches, and before passes are shorter, after 16."""


@contextmanager
def snapshot_folder(plan: Plan, call: Call) -> Iterator[SnapshotFolder | str | None]:
    """Make a folder for the snapshot of a rehearsal, beside those of runs or, if these are at a URL, on this machine.

    The folder is removed at the end of the context.

    Yields:
        The folder; or a text with the reason why there is none; or None, if the run is not to keep snapshots.

    Raises:
        PlanError: if snapshots are asked for, and the run has no folder.
    """
    run_dir = plan.config.run_dir
    if all(extension.name != "resume" for extension in wanted(plan)):
        yield None
        return
    from lagom.extensions.resume.kept_call import NO_FOLDER, obstacle, write_call

    if not run_dir:
        raise PlanError(NO_FOLDER)
    if (why := obstacle(plan, call)) is not None:
        yield why
        return
    if getattr(plan.config, "zero_lvl", 0):
        yield f"{UNREHEARSED}with zero_lvl, each rank writes a part of a snapshot, in a rehearsal rank 0 alone"
        return
    with ExitStack() as stack:
        try:
            top = Path(tempfile.gettempdir()) if is_url(run_dir) else on_disk(run_dir)
            if not top.exists():
                top.mkdir(parents=True)
                stack.callback(_remove_empty, top)
            path = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=top, ignore_cleanup_errors=True)
            )
        except OSError as error:
            folder: SnapshotFolder | str = f"nothing can be written to run_dir: {error}"
        else:
            folder = SnapshotFolder(os.path.realpath(path))
            write_call(folder, call)
        yield folder


def _remove_empty(folder: os.PathLike[str]) -> None:
    with suppress(OSError):
        os.rmdir(folder)


def snapshot_after(one: Record) -> int:
    """Return the number of backwards before the snapshot: 5/8 of all, so in the second of two equally long passes."""
    return max(1, min(len(one.steps) * 5 // 8, _LATEST))


def without_snapshot(why: str) -> ComparisonRow:
    """Return the row for a program that no snapshot has been taken of."""
    note = why
    if not why.startswith(UNREHEARSED):
        note = f"{why}; meanwhile a run that loses a rank restarts from the beginning"
    return ComparisonRow("snapshot", "", "none", AgreementLevel.UNKNOWN, note)


def without_rehearsal(record: Record) -> ComparisonRow:
    """Return the row for a program that asks for no batch where the rehearsal would take a snapshot."""
    told = f"after backward {snapshot_after(record)} the program asks no loader for a batch"
    note = f"not rehearsed: {told if record.steps else 'the program runs no backward'}"
    return ComparisonRow("snapshot", "", "none", AgreementLevel.UNKNOWN, note)


def compare_resumed(
    whole: Sequence[Record], resumed: Sequence[Record], place: str, again: Record | None = None
) -> ComparisonRow:
    """Compare ranks that went on from a snapshot at ``place`` with ranks that ran without a break, in one row.

    Args:
        again: the record of a second run of one process: values that differ there cannot be expected to agree.
    """
    num = len(whole[0].steps) - whole[0].num_before
    rows = compare(whole[0], resumed, again)
    worst = max(rows, key=lambda row: row.level)
    if worst.level > AgreementLevel.AGREES:
        shown = f"{worst.one} before, {worst.ranks} now" if worst.one != worst.ranks else ""
        note = ", ".join(filter(None, (f"the program continues differently: {worst.what}", worst.note or shown)))
        return ComparisonRow("snapshot", "", place, AgreementLevel.DIFFERS, note)
    is_exact = all(_numbers(one) == _numbers(other) for one, other in zip(whole, resumed, strict=True))
    note = f"continues from there with {'the same bits' if is_exact else 'the same numbers, but for rounding'}"
    return ComparisonRow("snapshot", "", place, AgreementLevel.AGREES, f"{note}, for {num} backwards")


def _numbers(record: Record) -> str:
    """Return the numbers of the training as text, in which a NaN is the same as another."""
    leaves = [leaf.end for _, leaf in sorted(record.leaves.items())]
    return repr(([(step.loss, step.gradients) for step in record.steps], leaves))
