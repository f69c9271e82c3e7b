"""``ParameterResidency``: which parameters are whole on this rank, and how many bytes stay for the next use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.zero.parameters.storage import ParameterStorage

ROOM = 4 << 20
"""Bytes of whole parameters that are kept for the next use, at least."""
TIMES = 3
"""Of being made whole in one forward or backward, from which a parameter is kept until that has ended."""
SHARE_KEPT = 16
"""One of so many bytes of all parameters is kept."""


class ParameterResidency:
    """Those that are whole, in the order in which they became so.

    Args:
        settle: has this rank's part of a unit be that of the whole.
    """

    def __init__(self, settle: Callable[[ParameterStorage], None]) -> None:
        self._settle = settle
        self._units: dict[int, ParameterStorage] = {}
        """By the address of their storage."""
        self._num_bytes = 0
        """Theirs."""
        self._num_all = 0
        """Bytes of all units that are there, whole or not."""
        self._times: dict[ParameterStorage, int] = {}
        """How often each has been made whole since ``begin``."""
        self._more = 0
        """Bytes to be kept besides, of those that are needed again and again."""

    def units(self) -> list[ParameterStorage]:
        """All of them; they may be let go of meanwhile."""
        return list(self._units.values())

    def adopt(self, unit: ParameterStorage) -> None:
        """It is new, and whole."""
        self._units[unit.place] = unit
        self._num_bytes += unit.num_bytes
        self._num_all += unit.num_bytes

    def begin(self) -> None:
        """A forward or a backward does."""
        self._times.clear()
        self._more = 0

    def needed(self, unit: ParameterStorage) -> None:
        """It is made whole for its values."""
        self._times[unit] = self._times.get(unit, 0) + 1
        if self._times[unit] == TIMES:
            self._more += unit.room

    def allocate(self, unit: ParameterStorage) -> None:
        """Give it memory, without values."""
        unit.storage().resize_(unit.room)
        unit.is_whole = True
        self._units[unit.place] = unit
        self._num_bytes += unit.num_bytes

    def free(self, unit: ParameterStorage) -> None:
        """Let go of its memory."""
        unit.storage().resize_(0)
        unit.is_whole = unit.is_changed = False
        del self._units[unit.place]
        self._num_bytes -= unit.num_bytes

    def make_room(self, coming: int, keep: Sequence[ParameterStorage] = ()) -> bool:
        """Let go of what has been whole for longest where so many bytes are ``coming``; whether anything had to go."""
        room = max(ROOM, self._num_all // SHARE_KEPT) + self._more - coming
        before = self._num_bytes
        for unit in list(self._units.values()):
            if self._num_bytes <= room:
                break
            if not (unit.is_held or unit in keep or not unit.is_alive):
                self._settle(unit)
                self.free(unit)
        return self._num_bytes < before

    def rest(self) -> None:
        """Nothing is needed for the moment: let go of all whose memory need not stay."""
        self._times.clear()
        self._more = 0
        for unit in list(self._units.values()):
            if unit.is_alive and not unit.is_held:
                self._settle(unit)
                self.free(unit)

    def forget(self, unit: ParameterStorage) -> None:
        """It is shared out no more, or gone; its memory is not for this to handle."""
        self._num_all -= unit.num_bytes
        if self._units.pop(unit.place, None) is not None:
            self._num_bytes -= unit.num_bytes

    def clear(self) -> None:
        """Forget all."""
        self._units.clear()
