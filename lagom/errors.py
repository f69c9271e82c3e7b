"""The errors lagom raises at run time; wrong settings are plain ``ValueError``."""

from __future__ import annotations


class LagomError(RuntimeError):
    """Something went wrong in a run, as opposed to in a setting."""


class PlanError(LagomError):
    """The run cannot fit the cluster as it is; the text says what would."""


class PayloadError(LagomError):
    """The function, its data or its result cannot travel between driver and ranks."""


class DataError(LagomError):
    """Something in a data set cannot be read, or cannot be a tensor; the text names file, row group, column and row."""


class RankError(LagomError):
    """A rank ended without an exception that could be brought back: killed, exited, or unpicklable."""

    def __init__(self, message: str, rank: int | None = None, exit_status: int | str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_status = exit_status
        """What the rank gave to ``sys.exit``, if that is how it ended."""

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int | None, int | str | None]]:
        return type(self), (str(self), self.rank, self.exit_status)


class StallError(RankError):
    """A rank got nowhere for ``timeout_s``; the text says what it was doing, and which ranks waited for it."""


class CollectiveError(LagomError):
    """An exchange between ranks failed, as a rule because another rank is gone: a consequence, not a cause."""


class DivergenceError(LagomError):
    """Ranks hold different numbers where one machine would hold one."""


class VerificationError(LagomError):
    """A rehearsal on the ranks did not give what one process gives; the text is the comparison. Nothing else ran."""


class RankTraceback(Exception):
    """Set as the ``__cause__`` of an exception that a rank raised: prints that rank's own traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n\n{self.text}"
