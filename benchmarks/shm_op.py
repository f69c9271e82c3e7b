"""Loads DeepSpeed's op for sums in shared memory, to be compared with lagom's; the first load compiles for minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def load() -> Any:
    """Compile if needed, and load the module of the op; call this before ranks are forked.

    Raises:
        Exception: any error, if DeepSpeed is not installed, or the op does not build or suit this processor.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    builder = ShareMemCommBuilder()
    if not builder.is_compatible(verbose=False):
        raise RuntimeError("its builder says that it does not fit this machine")
    found = builder.load(verbose=False)
    if found.vector_kernel_level() < 1:
        raise RuntimeError("it needs a processor with AVX2")
    return found


def join(op: Any, rank: int, size: int, name: str) -> None:
    """Join the op's group as ``rank`` of ``size``; ``name`` separates groups on this host."""
    os.environ |= {"LOCAL_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": name}
    op.initialize(size, rank)


def clean(name: str) -> None:
    """Remove the files that the group ``name`` has left in /dev/shm."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{name}_*"):
        path.unlink()
