"""What programs import as ``sparkdl.horovod``."""

from __future__ import annotations

import sys


def log_to_driver(message: object) -> None:
    """Print a line of 4000 characters at most; rank 0's output reaches the driver, with log="all" every rank's."""
    sys.stdout.write(str(message)[:4000] + "\n")
    sys.stdout.flush()
