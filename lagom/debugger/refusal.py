"""``refuse``: ``breakpoint()`` in a process that a rank has started anew, which Python finds by PYTHONBREAKPOINT."""

from __future__ import annotations

import os
from typing import NoReturn

from lagom.errors import LagomError

BY_NAME = f"{__name__}.refuse"
"""Value of PYTHONBREAKPOINT: the one thing that tells a process which is started anew, not forked, what to do."""


def refuse(*_: object, **__: object) -> NoReturn:
    """Say that this process cannot stop.

    Raises:
        LagomError: always.
    """
    raise LagomError(
        f"breakpoint() in process {os.getpid()}, which a rank has started, and only a rank itself stops; where the "
        "process is a worker of a DataLoader, num_workers=0 has the rank load its batches"
    )
