"""``LearnedFacts``: what lagom has learned of a program, so that another process computes by the same arithmetic."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lagom.errors import LagomError
from lagom.extensions.resume.frame_position import NoSnapshotError

if TYPE_CHECKING:
    from lagom.session.session import Session
    from lagom.session.state_groups import Learned


@dataclass(frozen=True, slots=True)
class LearnedFacts:
    """Facts about objects of the program. See Note [Learned facts]."""

    world_size: int
    facts: Mapping[str, Learned]
    """Facts by the name of the part of lagom that has learned them."""

    @classmethod
    def of(cls, session: Session) -> LearnedFacts:
        """Collect the facts of this rank.

        Raises:
            NoSnapshotError: if facts may differ between ranks, as after ``lagom.rank()``.
        """
        try:
            return cls(session.world_size, {name: state() for name, (state, _) in session.resumption.learned.items()})
        except LagomError as error:
            raise NoSnapshotError(str(error)) from error

    def reduced(self, kept: Container[int]) -> Any:
        """Return how to pickle the facts about the whole program, and those about objects with the ids ``kept``."""
        facts = {
            name: [(one, fact) for one, fact in pairs if one is None or id(one) in kept]
            for name, pairs in self.facts.items()
        }
        return LearnedFacts, (self.world_size, facts)

    def restore(self, session: Session) -> None:
        """Give the facts to this rank, if there are as many ranks as before."""
        if self.world_size == session.world_size:
            for name, pairs in self.facts.items():
                session.resumption.learned[name][1](pairs)


# Note [Learned facts]
#
# lagom learns of a program while it runs: which forwards can be shared out by rows, whether all ranks compute the same
# gradients, how many backwards the program accumulates. Another order of additions follows, so the last digits depend
# on these facts. All ranks have learned the same, and a run that goes on with as many ranks begins with these facts.
# With another number of ranks it learns again.
#
# Facts are about objects, such as modules, and come last in a pickle: an object that the program does not hold any more
# shall not be in the pickle for the sake of a fact.
