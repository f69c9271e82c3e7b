"""Errors that lagom raises at run time; a wrong setting raises a plain ``ValueError``."""

from __future__ import annotations

import signal


class LagomError(RuntimeError):
    """A run failed; a wrong setting raises a ``ValueError`` instead."""


class PlanError(LagomError):
    """The run cannot begin as it was asked for, since it does not fit the cluster, for example.

    The text says what to change.
    """


class PayloadError(LagomError):
    """The function, its data or its result cannot be pickled, or the pickle that arrived cannot be read."""


class DataError(LagomError):
    """A data set cannot be read, or has a value that cannot be a tensor.

    The text says where, as far as that is known: file, row group, column and row.
    """


class SnapshotError(LagomError):
    """A run cannot go on from its snapshot; it can begin again."""


class RankError(LagomError):
    """A rank ended without an exception that could be sent to the driver: killed, exited, or unpicklable."""

    def __init__(self, message: str, rank: int | None = None, exit_status: int | str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_status = exit_status
        """Argument of ``sys.exit``, if the rank called it; else None."""

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int | None, int | str | None]]:
        return type(self), (str(self), self.rank, self.exit_status)


class StallError(RankError):
    """A rank made no progress for ``timeout_s``; the text says what it was doing, and which ranks waited for it."""


class CollectiveError(LagomError):
    """An exchange between ranks failed, mostly because another rank has ended: a consequence, not a cause."""


class DivergenceError(LagomError):
    """Ranks have different values where one process would have one, or are at different places of the program."""


class VerificationError(LagomError):
    """Rehearsals have not shown that the run gives one process's numbers; the text compares them. No run started."""


class MetricError(LagomError):
    """A trial of a search returned no metric, or a metric that is not one number."""


class AblationError(LagomError):
    """A component of an ablation study cannot be left out of this program; the text says what to do."""


class Terminated(SystemExit, KeyboardInterrupt):
    """SIGTERM has ended a run, as Ctrl-C would; not caught, it ends Python with status 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class EndOfFunction(BaseException):
    """Ends the training function early without a failure; no ``except Exception`` of the program catches it."""


class RankTraceback(Exception):
    """The ``__cause__`` of a rank's error: prints the rank's own traceback, or the last output of a killed rank."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n\n{self.text}"
