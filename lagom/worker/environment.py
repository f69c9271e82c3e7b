"""The environment variables of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lagom.worker.spec import Seat

# Libraries take these for the word of torchrun and behave as a rank of it. To the program, there is no such thing.
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


@contextmanager
def environment(seat: Seat | None) -> Iterator[None]:
    """Show the rank its own GPU and no launcher meanwhile; afterwards everything is as before."""
    before = dict(os.environ)
    if seat is not None:
        for name in _LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        if seat.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = seat.gpu
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
