"""``ParameterResidency``: the parameters that are whole on this rank, within a limit of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.extensions.zero.parameters.storage import ParameterStorage

ROOM = 4 << 20
"""Lower bound, in bytes, of the limit up to which whole parameters are kept for their next use."""
TIMES = 3
"""After this many all-gathers of a parameter in a forward or backward, raise the limit by its bytes until that ends."""
SHARE_KEPT = 16
"""Divisor: the limit is the bytes of all sharded parameters divided by this number, or ``ROOM`` if that is more."""


class ParameterResidency:
    """Tracks which parameters are whole, and frees those that were whole for longest when a limit is exceeded.

    Args:
        settle: updates this rank's shard of a unit (the storage of one parameter) from the whole parameter, before the
            unit is freed.
    """

    def __init__(self, settle: Callable[[ParameterStorage], None]) -> None:
        self._update_shard = settle
        self._units: dict[int, ParameterStorage] = {}
        """Whole units by the address of their storage."""
        self._num_bytes = 0
        """Bytes of the whole units."""
        self._num_all = 0
        """Bytes of all existing units, whole or not."""
        self._times: dict[ParameterStorage, int] = {}
        """Number of all-gathers of each unit since ``begin``."""
        self._more = 0
        """Bytes by which the limit is raised for units that were gathered ``TIMES`` times since ``begin``."""

    def units(self) -> list[ParameterStorage]:
        """Return a list of all whole units, which stays valid if units are freed meanwhile."""
        return list(self._units.values())

    def adopt(self, unit: ParameterStorage) -> None:
        """Add a new unit, which is whole."""
        self._units[unit.place] = unit
        self._num_bytes += unit.num_bytes
        self._num_all += unit.num_bytes

    def begin(self) -> None:
        """Reset the counts of all-gathers at the begin of a forward or a backward."""
        self._times.clear()
        self._more = 0

    def count_gather(self, unit: ParameterStorage) -> None:
        """Count an all-gather of the unit."""
        self._times[unit] = self._times.get(unit, 0) + 1
        if self._times[unit] == TIMES:
            self._more += unit.room

    def allocate(self, unit: ParameterStorage) -> None:
        """Give the unit memory, without values."""
        unit.storage().resize_(unit.room)
        unit.is_whole = True
        self._units[unit.place] = unit
        self._num_bytes += unit.num_bytes

    def free(self, unit: ParameterStorage) -> None:
        """Free the memory of the unit."""
        unit.storage().resize_(0)
        unit.is_whole = unit.is_changed = False
        del self._units[unit.place]
        self._num_bytes -= unit.num_bytes

    def make_room(self, coming: int, keep: Sequence[ParameterStorage] = ()) -> bool:
        """Free the units that were whole for longest, until ``coming`` bytes fit into the limit.

        Units of ``keep``, and units that must stay in place, are not freed. Return whether any unit was freed.
        """
        room = max(ROOM, self._num_all // SHARE_KEPT) + self._more - coming
        before = self._num_bytes
        for unit in list(self._units.values()):
            if self._num_bytes <= room:
                break
            if not (unit.is_held or unit in keep or not unit.is_alive):
                self._update_shard(unit)
                self.free(unit)
        return self._num_bytes < before

    def free_idle(self) -> None:
        """Free all units whose memory need not stay in place: no operation needs whole parameters now."""
        self._times.clear()
        self._more = 0
        for unit in list(self._units.values()):
            if unit.is_alive and not unit.is_held:
                self._update_shard(unit)
                self.free(unit)

    def forget(self, unit: ParameterStorage) -> None:
        """Stop counting a unit that is no longer sharded, or gone; its memory is left alone."""
        self._num_all -= unit.num_bytes
        if self._units.pop(unit.place, None) is not None:
            self._num_bytes -= unit.num_bytes

    def clear(self) -> None:
        """Forget all units."""
        self._units.clear()
