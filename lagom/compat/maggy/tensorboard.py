"""``maggy.tensorboard``: where a training function keeps what TensorBoard shows."""

from __future__ import annotations

import os

__all__ = ["logdir"]


def logdir() -> str:
    """A folder in the working directory; that of rank 0 is there when the run is over, as other files are."""
    path = os.path.abspath("training_logs")
    os.makedirs(path, exist_ok=True)
    return path
