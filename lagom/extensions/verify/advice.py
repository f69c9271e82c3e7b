"""``advise``: explains a comparison in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from lagom.extensions.verify.comparison_row import ComparisonRow


def advise(verdict: str, rows: Sequence[ComparisonRow], better: str | None, is_shared: bool) -> str:
    """Return the finding and the advice.

    Args:
        better: a setting with which the ranks do the same as one process; if they do already, a faster setting; None if
            no such setting was found.
        is_shared: whether the ranks do different work.
    """
    if verdict == "agrees":
        return " ".join(filter(None, (_right(better, is_shared), _not_compared(rows))))
    instead = f"with {better} it agrees" if better else "no other setting agrees either"
    if verdict in _FIXED:
        return _FIXED[verdict].format(instead=instead)
    if better:
        return f"This program needs {better}: with it, the ranks do what one process does."
    return (
        "This program cannot be distributed faithfully: no setting gives what one process gives. "
        "Run it with world_size=1."
    )


def _right(better: str | None, is_shared: bool) -> str:
    if is_shared:
        also = f" So they do with {better}, which costs no exchange for each forward." if better else ""
        return "The ranks do what one process does." + also
    faster = f" {better} shares it out, and gives the same." if better else ""
    return (
        "Right, but forward and backward are no faster than in one process: every rank computes all of them." + faster
    )


def _not_compared(rows: Sequence[ComparisonRow]) -> str:
    if any(row.what == "result" and row.one == "not reached" for row in rows):
        return "The rehearsal ended before the function returned: what it returns is not compared."
    return ""


_FIXED = {
    "random": (
        "Not the numbers of one process: each rank draws random numbers of its own. With dropout off and a sample's "
        "random numbers fixed by its index the ranks do what one process does; for its very numbers: {instead}."
    ),
    "own": (
        "Not what one process shows: training is that of one process, but numbers that the program reads or prints are "
        "those of a rank's own share; {instead}."
    ),
    "raises": (
        "One process ends with an error, and so do the ranks; up to there they do the same. What would follow is not "
        "compared. Where the error comes of the rehearsal, whose passes over loaders are short, leave out verify=True."
    ),
    "strays": (
        "The ranks do what one process does, but from a snapshot the program does not go on as it would have: after a "
        "loss it would give other numbers. With snapshot_every_s=None (lagom run without --snapshot-every) it runs, "
        "and restarts from the beginning after a loss."
    ),
    "unsteady": (
        "Two runs of one process already differ from each other, so there is nothing to compare with: start every "
        "generator of the program's own from a fixed seed, end loops by counts and not by the clock, or leave out "
        "verify=True."
    ),
    "dies": (
        "The process of the rehearsal died, as it would without ranks: there is nothing to compare with. Run the "
        "program with world_size=1 to see why."
    ),
    "unlike": (
        "A data set of this program shards itself (lagom_sharded), so that each rank has batches that one process "
        "never has: what differs may be right, and is for you to judge."
    ),
}
