"""``WholeModule``: a module that ran whole on every rank, and why, for ``Result.whole`` and the run's records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lagom.forward.rows.whole_reasons import WholeReason


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WholeModule:
    """A module that ran whole on every rank though it might have been split, for one reason, as rank 0 saw it."""

    name: str
    """Class of the outermost module, and the path of attributes from there, such as "Net.encoder.layers.0"."""
    kind: str
    """Name of the module's class."""
    reason: WholeReason
    """Why the module ran whole."""
    text: str
    """The reason in words, about this module."""
    remedy: str
    """What would help; "" if nothing would."""
    calls: int
    """Number of calls that ran whole for this reason, without those by which lagom examined the module."""
    share: float
    """Share of the seconds of all forwards that these calls took, without modules inside that ran split or are listed
    themselves. On a GPU these are the seconds in which forwards were queued."""
    splits_inside: bool
    """Whether modules inside it were split in any of these calls."""
    is_small: bool = False
    """Whether it runs whole only because splitting it would take longer."""
    pays_from: int | None = None
    """Rows of a batch from which ranks would split a small module that is trained; None if unknown."""

    def __repr__(self) -> str:
        kind = "" if self.kind == self.name else f" ({self.kind})"
        calls = f"{self.calls} call{'s' * (self.calls != 1)}, {self.share:.1%} of the time of forwards"
        inside = ", modules inside it are split" if self.splits_inside else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"<{self.name}{kind}: {calls}{inside}: it {self.text}{remedy}>"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for the run's records, with the name of the reason."""
        return {name: getattr(self, name) for name in self.__slots__} | {"reason": self.reason.name}
