"""``maggy.tensorboard``: the folder for TensorBoard's files."""

from __future__ import annotations

import os

__all__ = ["logdir"]


def logdir() -> str:
    """Make and return a folder in the working directory; after the run it holds the files of rank 0."""
    path = os.path.abspath("training_logs")
    os.makedirs(path, exist_ok=True)
    return path
