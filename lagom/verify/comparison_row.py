"""A row of the comparison: one thing as one process has it and as the ranks do."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How a comparison ended, the better the lower."""

    UNKNOWN = -1
    AGREES = 0
    OWN = 1
    """Training agrees; a number that is shown is that of a rank's own share."""
    DIFFERS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was compared."""

    what: str
    one: str
    """As one process has it."""
    ranks: str
    level: Level
    note: str = ""
    """What to make of it, where there is something to say."""
