"""``ComparisonRow``: one quantity of one process and of the ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class AgreementLevel(enum.IntEnum):
    """The result of a comparison, from "nothing to compare" (UNKNOWN) to the worst."""

    UNKNOWN = -1
    AGREES = 0
    OWN = 1
    """Training agrees; a number that the program shows is that of a rank's own share."""
    DIFFERS = 2


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One row of the table of ``verify``: a quantity in one process and on the ranks, and how well both agree."""

    what: str
    one: str
    """Value of the quantity in one process."""
    ranks: str
    level: AgreementLevel
    note: str = ""
    """An explanation, if there is one."""
