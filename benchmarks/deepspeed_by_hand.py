"""DeepSpeed by hand, as a contender of ``benchmarks.zero_memory`` and ``benchmarks.zero_step``."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lagom.extensions.zero.deepspeed.loading import environment, load

STAGES = (0, 1, 2, 3)
BUCKETS: Mapping[str, int] = {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000}
"""Elements in DeepSpeed's buckets; lagom's backend="deepspeed" gets the same."""
MISSING = "DeepSpeed is not here, and left out: pip install 'lagom-spark[deepspeed]'"


def is_here() -> bool:
    """Return whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


def join() -> None:
    """Start a process group over gloo as distributed programs do, so that lagom does not distribute this one."""
    torch.distributed.init_process_group("gloo")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)


@contextmanager
def engine(network: nn.Module, optimizer: Any, stage: int, batch: int) -> Iterator[tuple[Any, Any]]:
    """Yield a DeepSpeed engine, and an object with the methods of an optimizer that calls the engine.

    The engine's sums go through gloo: without the patch, DeepSpeed would compile its op for shared memory.

    Args:
        batch: samples per rank and step.
    """
    deepspeed = load("cpu")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    config: Mapping[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **BUCKETS},
        "zero_allow_untested_optimizer": True,
    }
    with environment(LOCAL_RANK="0"):
        made, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config, dist_init_required=False)
        yield made, _Stepped(made)


class _Stepped:
    """Wraps DeepSpeed's engine in the methods of an optimizer and ``backward``, for the loop of the benchmarks."""

    def __init__(self, made: Any) -> None:
        self._engine = made

    def zero_grad(self) -> None:
        """Do nothing: the engine's step clears gradients."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run the engine's backward, since ``loss.backward()`` would not average gradients at stage 0."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Run the engine's step."""
        self._engine.step()
