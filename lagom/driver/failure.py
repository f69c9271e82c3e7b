"""``raise_failure``: raises the error of the rank that failed first."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from lagom.driver.protocol import Outcome
from lagom.errors import LagomError, RankError, RankTraceback, StallError
from lagom.watch.notebook import with_cell_names
from lagom.wire.messages import RankReport


def raise_failure(outcomes: Sequence[Outcome]) -> None:
    """Raise the first failed rank's error, if any rank failed; see ``experiment.lagom`` for the kinds of errors.

    Raises:
        RankError: also if a rank was stopped, and none has failed.
    """
    failed = [outcome for outcome in outcomes if outcome.report.has_failed]
    if failed:
        # A failed rank causes errors on other ranks, which lose their connection to it: take these last.
        first = min(failed, key=lambda outcome: (outcome.report.consequence, outcome.report.order))
        raise _exception(_error(first), first.report)
    if stopped := [outcome.rank for outcome in outcomes if not outcome.report.ok]:
        raise RankError(f"rank {stopped[0]} was stopped before the function returned, and nobody said why", stopped[0])


def _error(outcome: Outcome) -> BaseException | None:
    try:
        error = outcome.load().get("error")
    except Exception:  # the error's class cannot be imported here, or its pickle cannot be loaded
        return None
    return error if isinstance(error, BaseException) else None


def _exception(error: BaseException | None, report: RankReport) -> BaseException:
    """Return ``error``, or, if it is None, a RankError with the report's text; its cause is the rank's traceback."""
    rank = report.rank
    if error is None:
        if report.exited:
            what = f"rank {rank} called sys.exit({report.exit!r})"
        elif report.died or report.error == "StallError":
            what = report.message
        else:
            what = f"rank {rank} raised {report.error}: {report.message}"
        kind = StallError if report.error == "StallError" else RankError
        error = kind(what, rank, report.exit)
    if isinstance(error, LagomError) and error.args and isinstance(error.args[0], str):
        # The message may say where in the program a rank was. A program's own subclass may refuse the change.
        with contextlib.suppress(Exception):
            error.args = with_cell_names(error.args[0]), *error.args[1:]
    error.__cause__ = RankTraceback(rank, with_cell_names(report.traceback))
    add_advice(error, report.advice)
    return error


def add_advice(error: BaseException, text: str) -> None:
    """Have Python show ``text`` below ``error``, whose own text stays as it is; Python 3.10 shows it at once."""
    if not text:
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        sys.stderr.write(f"{text}\n")


def message_of(error: BaseException) -> str:
    """Return ``str(error)``; if that fails, a text that says so."""
    try:
        return str(error)
    except Exception as failure:  # ``__str__`` of a program's own class may raise any error
        return f"(its message fails with {type(failure).__name__})"
