"""A row of the comparison: one thing as one process has it and as the ranks do."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class AgreementLevel(enum.IntEnum):
    """How a comparison ended, the better the lower."""

    UNKNOWN = -1
    AGREES = 0
    OWN = 1
    """Training agrees; a number that is shown is that of a rank's own share."""
    DIFFERS = 2


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One thing that was compared."""

    what: str
    one: str
    """As one process has it."""
    ranks: str
    level: AgreementLevel
    note: str = ""
    """What to make of it, where there is something to say."""
