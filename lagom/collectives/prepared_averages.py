"""``PreparedAverages``: averages over the ranks, prepared once; each then takes one call of compiled code."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from lagom.collectives.native import TYPES, native
from lagom.collectives.operation import RANKS, named
from lagom.collectives.requests import RequestExchange
from lagom.monitor.spans import COLLECTIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lagom.collectives.native import Communicator


class PreparedAverages(RequestExchange):
    """Prepares averages. An average is a kind of exchange; in it too a rank may request something else first."""

    @abstractmethod
    def _with_room(self, size: int) -> Communicator | None:
        """Return the communicator of all ranks if its messages have room for ``size`` bytes; None if there is none."""

    def averaging(
        self, size: int, sections: Sequence[tuple[int, int, torch.dtype]]
    ) -> Callable[[bytes, Sequence[int], Sequence[int]], bool] | None:
        """Prepare an average of numbers in ``sections`` of ``size`` bytes; return None if no compiled code can do it.

        The returned function takes a signature, the address of each section's numbers and the address for each
        section's average, which may be the same one. It averages if all ranks call it with the same signature, and
        returns whether they did. For the other ranks a call is an ``exchange`` of the signature and these bytes.

        Args:
            sections: for each the first byte, how many numbers, and their type.
        """
        near = self._with_room(size)
        if near is None:
            return None
        prepared = native().Sections([(start, count, TYPES[dtype]) for start, count, dtype in sections], size)
        call = near.average
        if self.spans is not None:
            call = self.spans.timed(COLLECTIVE, "average", call, size, RANKS)

        def average(signed: bytes, given: Sequence[int], averages: Sequence[int]) -> bool:
            while True:
                try:
                    if call(signed, given, averages, prepared):
                        return True
                except (RuntimeError, OSError) as error:
                    raise named("exchange", error) from error
                if not self._served(near.rows()):
                    return False

        return average
