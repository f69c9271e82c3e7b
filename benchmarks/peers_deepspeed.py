"""DeepSpeed by hand beside lagom's two backends, at levels 1 to 3: bytes that a rank holds, and time per step.

    python -m benchmarks.peers_deepspeed [--million 20] [--world-size 2] [--rounds 3] [--steps 10]

The model is that of benchmarks.zero_memory, an MLP with Adam in float32, and what is held is counted as there, after
the third backward. Of DeepSpeed both have buckets of 5 million elements, and no op that has to be compiled: its sums go
through gloo. Contenders take turns, each a run of its own; the time is the median of all their steps, with a batch of
64 samples and a thread on each rank. What DeepSpeed holds beyond the formula (8 + 8/N, 4 + 12/N and 16/N bytes a
parameter) is its own copy of the parameters that a rank steps, and its buckets.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import zero_memory
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.strategies.deepspeed.loading import environment, load

LEVELS = (1, 2, 3)
KINDS = ("lagom, torch", "lagom, deepspeed", "DeepSpeed by hand")
BATCH = 64
_WARM_UP = 3
"""Steps that are not timed; in the last of them bytes are counted."""
BUCKETS = {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000}
Outcome = tuple[int, int, list[float]]
"""Bytes that a rank holds, and takes at the peak; seconds of each step."""
FORMULAS = {1: lambda n: 8 + 8 / n, 2: lambda n: 4 + 12 / n, 3: lambda n: 16 / n}


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    args = _arguments(argv)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    width = int((args.million * 1e6 / zero_memory.LAYERS) ** 0.5)
    rows: dict[tuple[str, int], list[Outcome]] = {}
    for number in range(args.rounds):
        for level in LEVELS:
            for kind in KINDS if number % 2 else KINDS[::-1]:
                found = measured(kind, level, width, args.world_size, args.steps)
                rows.setdefault((kind, level), []).extend(found)
    print(f"{args.million:g} million parameters, {args.world_size} ranks: MB on the rank with most, ms per step")
    columns = ("held", "formula", "peak", "ms", "quartiles", "", "of by hand's")
    print(" " * 22 + "".join(f"{column:>12}" for column in columns))
    for level in LEVELS:
        formula = FORMULAS[level](args.world_size) * args.million
        peer = statistics.median(_seconds(rows[KINDS[-1], level]))
        for kind in KINDS:
            every = rows[kind, level]
            held, peak = (max(column) / 1e6 for column in list(zip(*every, strict=True))[:2])
            low, median, high = statistics.quantiles([1e3 * one for one in _seconds(every)], n=4)
            figures = (held, formula, peak, median, low, high)
            print(f"{kind + f' {level}':22}" + "".join(f"{v:12.1f}" for v in figures) + f"{median / 1e3 / peer:11.2f}x")
    return 0


def _seconds(rows: Sequence[Outcome]) -> list[float]:
    return [one for *_, seconds in rows for one in seconds]


def measured(kind: str, level: int, width: int, world_size: int, steps: int) -> Sequence[Outcome]:
    """Of each rank."""
    by_hand = kind == KINDS[-1]
    backend: Any = "deepspeed" if kind == KINDS[1] else "torch"
    config = TorchDistributedConfig(
        hparams={"width": width, "steps": steps, "level": level},
        world_size=world_size,
        launcher="local",
        zero_lvl=0 if by_hand else level,
        backend=backend,
        deepspeed_config={"zero_optimization": BUCKETS} if backend == "deepspeed" else None,
    )
    program: Callable[..., Outcome] = deepspeed_by_hand if by_hand else train
    rows: Sequence[Outcome] = experiment.lagom(program, config).per_rank
    return rows


def train(width: int, steps: int) -> Outcome:
    """The loop that anybody would write."""
    torch.set_num_threads(1)
    base = zero_memory._start()
    network = zero_memory.model(width)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    return _steps(network, optimizer, width, steps, base)


def deepspeed_by_hand(width: int, steps: int, level: int) -> Outcome:
    """The same through DeepSpeed; on lagom's ranks, from which it steps back with the first line."""
    torch.distributed.init_process_group("gloo")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    deepspeed = load("cpu")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    base = zero_memory._start()
    network = zero_memory.model(width)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    config: Mapping[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": level, **BUCKETS},
        "zero_allow_untested_optimizer": True,
    }
    with environment(LOCAL_RANK="0"):
        engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config, dist_init_required=False)
        return _steps(engine, _Stepped(engine), width, steps, base)


class _Stepped:
    """The engine in the place of an optimizer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def zero_grad(self) -> None:
        """The step does it."""

    def step(self) -> None:
        self._engine.step()


def _steps(network: nn.Module, optimizer: Any, width: int, steps: int, base: int) -> Outcome:
    x = torch.randn(BATCH, width)
    seconds, held, peak = [], 0, 0
    for number in range(_WARM_UP + steps):
        if number == _WARM_UP - 1:
            zero_memory._start()
        started = time.perf_counter()
        optimizer.zero_grad()
        network(x).square().mean().backward()
        if number == _WARM_UP - 1:
            held = sum(zero_memory._held(network))
        optimizer.step()
        if number == _WARM_UP - 1:
            peak = zero_memory._status("VmHWM") - base
        seconds.append(time.perf_counter() - started)
    return held, peak, seconds[_WARM_UP:]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DeepSpeed by hand beside lagom's two backends.")
    parser.add_argument("--million", type=float, default=20.0, help="parameters")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
