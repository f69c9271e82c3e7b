"""``refuse``: refuses ``breakpoint()`` in a process that a rank has started.

A spawned process finds ``refuse`` by PYTHONBREAKPOINT; in a forked process, ``RankDebugger`` calls it.
"""

from __future__ import annotations

import os
from typing import NoReturn

from lagom.errors import LagomError


def refuse(*_: object, **__: object) -> NoReturn:
    """Refuse a breakpoint in this process.

    Raises:
        LagomError: always.
    """
    raise LagomError(
        f"breakpoint() in process {os.getpid()}, which a rank has started, and only a rank itself stops; where the "
        "process is a worker of a DataLoader, num_workers=0 has the rank load its batches"
    )
