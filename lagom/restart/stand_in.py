"""``rank_pid``: tells the rank's own process from its forks, also after a sleeping twin has taken the rank's place."""

from __future__ import annotations

import os

_names: dict[int, int] = {}


def rank_pid() -> int:
    """Return the id of this process; in a twin that has taken a rank's place, the id of the rank's first process."""
    pid = os.getpid()
    return _names.get(pid, pid)


def stand_in_for(pid: int) -> None:
    """Let this process, a twin, count as the process ``pid``, in which the rank began."""
    _names[os.getpid()] = pid
