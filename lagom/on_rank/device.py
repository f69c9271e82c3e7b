"""The device and the number of threads of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lagom.errors import RankError
from lagom.plan import Plan


def rank_device(plan: Plan, index: int = 0) -> torch.device:
    """Select and return the rank's device: with GPUs the one at ``index`` in CUDA_VISIBLE_DEVICES, else the CPU.

    Raises:
        RankError: if the run was planned with GPUs and torch finds none on this rank.
    """
    if not plan.gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RankError(
            f"this rank was given a GPU, but torch {torch.__version__} finds none; install a CUDA build of torch "
            "on the executors, or run without GPUs (CUDA_VISIBLE_DEVICES='', no spark.task.resource.gpu.amount)"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Context manager in which torch uses ``count`` threads; 0 changes nothing."""
    if count == 0:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
