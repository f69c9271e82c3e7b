"""``Stall``: for whom a long wait is, in words."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from lagom.compat.horovod.errors import HorovodInternalError

if TYPE_CHECKING:
    from lagom.compat.horovod.matching import Told
    from lagom.compat.horovod.notices import Notices

log = logging.getLogger("lagom")
LOOK_S = 1.0
"""How often who waits looks after the others."""


class Stall:
    """Says of a long wait for whom it is, as Horovod's stall check does, by the same settings."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        off = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        self._warn_s = 0.0 if off else float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", 60))
        self._end_s = 0.0 if off else float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0))
        self._told: set[str] = set()

    def look(self, name: str, seconds: float, pending: list[str], members: tuple[int, ...]) -> None:
        """Called every now and then while the program waits for ``name``."""
        ends = 0 < self._end_s <= seconds
        if not ends and not 0 < self._warn_s <= seconds:
            return
        self._notices.tell_pending(pending)
        if not ends and (name in self._told or seconds < self._warn_s + LOOK_S):
            return  # the others have not told yet
        self._told.add(name)
        text = f"{name!r} was asked for {seconds:.0f} s ago here, and not by " + "; ".join(self._missing(name, members))
        if ends:
            raise HorovodInternalError(text)
        log.warning("%s", text)

    def _missing(self, name: str, members: tuple[int, ...]) -> list[str]:
        found = []
        for member in members:
            asked = self._notices.pending(member)
            if name not in asked:
                what = f"which waits for {', '.join(map(repr, asked[:3]))}" if asked else "which waits for nothing"
                found.append(f"rank {member}, {what}")
        return found or ["some rank"]


def crossed(told: list[Told], members: tuple[int, ...]) -> str:
    """That all ranks wait for each other, and for what."""
    parts = []
    for member, each in zip(members, told, strict=True):
        names = [repr(one.name) for one in each.requests[:3]] + (["..."] if len(each.requests) > 3 else [])
        parts.append(f"rank {member} has joined" if each.joined else f"rank {member} waits for {', '.join(names)}")
    return f"no rank can go on: {'; '.join(parts)}. All ranks must ask for the same names"
