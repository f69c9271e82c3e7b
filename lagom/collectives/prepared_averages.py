"""``PreparedAverages``: averages over the ranks, prepared once; each then takes one call of compiled code."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from lagom.collectives.native import TYPES, native
from lagom.collectives.requests import RequestExchange, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lagom.collectives.native import Communicator


class PreparedAverages(RequestExchange):
    """An average is an exchange of its own kind, in which a rank may ask the others for something else first."""

    @abstractmethod
    def _with_room(self, size: int) -> Communicator | None:
        """What joins all ranks through memory that has room for messages of ``size`` bytes; None where nothing does."""

    def averaging(
        self, packed: torch.Tensor, sections: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
    ) -> Callable[[bytes], bool] | None:
        """A function that averages over the ranks if all call it with the same bytes, or None where there is none.

        To the other ranks a call is an ``exchange`` of these bytes and ``packed``.

        Args:
            packed: what this rank gives, at its address now.
            sections: start in ``packed``, the numbers there, and where their averages go.
        """
        near = self._with_room(packed.nbytes)
        if near is None:
            return None
        places = [(start, own.numel(), TYPES[own.dtype], total.data_ptr()) for start, own, total in sections]
        prepared = native().Sections(places, packed.nbytes)
        address, size = packed.data_ptr(), packed.nbytes

        def average(signed: bytes) -> bool:
            return self._agreed(near.rows, lambda: near.average(signed, address, size, prepared))

        return average

    def averaging_in_place(
        self, size: int, sections: Sequence[tuple[int, int, torch.dtype]]
    ) -> Callable[[bytes, Sequence[int]], bool] | None:
        """A function that does the same with numbers at addresses that are given with each call, and become averages.

        Args:
            size: bytes that would be packed.
            sections: start there, how many numbers, and of which type.
        """
        near = self._with_room(size)
        if near is None:
            return None
        prepared = native().Sections([(start, count, TYPES[dtype], 0) for start, count, dtype in sections], size)

        call = near.average_in_place

        def average(signed: bytes, addresses: Sequence[int]) -> bool:
            try:
                if call(signed, addresses, prepared):
                    return True
            except (RuntimeError, OSError) as error:
                raise named("exchange", error) from error
            again = self._served(near.rows())
            return again and self._agreed(near.rows, lambda: call(signed, addresses, prepared))

        return average
