"""Measures the time to launch a function that does nothing on 2 ranks, with lagom and with TorchDistributor.

    python -m benchmarks.launch [--rounds 5] [--master local[2]]

Each contender is called once to warm up, and then in all its rounds before the next contender starts. Turns would be
unfair: a job of TorchDistributor ends Spark's Python workers, so the next contender would start cold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks import peers
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Launcher

WORLD_SIZE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print medians, ranges and ratios; return 0 if the targets hold, else 1."""
    args = _arguments(argv)
    with peers.spark(args.master):
        seconds = measure(_contenders(), args.rounds)
    print(report(seconds))
    return 0 if all(held for _, held in targets(seconds)) else 1


def measure(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call, by contender; the first call of each is left out."""
    seconds = {}
    for name, call in contenders.items():
        times = [_seconds(call) for _ in range(rounds + 1)]
        seconds[name] = times[1:]
        print(f"{name}: done", file=sys.stderr)
    return seconds


def report(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a table, and a line for each target that says whether it holds."""
    slowest = statistics.median(seconds["TorchDistributor, distributed"])
    lines = [f"{f'no-op on {WORLD_SIZE} ranks, warm':30}  median s     min     max   faster by"]
    for name, times in seconds.items():
        median = statistics.median(times)
        lines.append(f"{name:30} {median:9.3f} {min(times):7.3f} {max(times):7.3f} {slowest / median:10.1f}x")
    lines += [f"{'holds' if held else 'MISSED':7}{target}" for target, held in targets(seconds)]
    return "\n".join(lines)


def targets(seconds: Mapping[str, Sequence[float]]) -> list[tuple[str, bool]]:
    """Return each target as text, and whether it holds for the medians."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    spark, local, peer = median["lagom, spark"], median["lagom, local"], median["TorchDistributor, distributed"]
    return [
        ("lagom on Spark takes at most 1/15 of TorchDistributor, distributed", spark * 15 <= peer),
        ("lagom on Spark takes less than 0.8 s", spark < 0.8),
        ("lagom local takes less than 0.5 s", local < 0.5),
    ]


def nothing() -> None:
    """Do nothing: the function that is launched."""


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _contenders() -> dict[str, Callable[[], object]]:
    return {
        "lagom, spark": lambda: _lagom("spark"),
        "lagom, local": lambda: _lagom("local"),
        "TorchDistributor, distributed": lambda: _torch_distributor(local_mode=False),
        "TorchDistributor, local": lambda: _torch_distributor(local_mode=True),
    }


def _lagom(launcher: Launcher) -> object:
    return experiment.lagom(nothing, TorchDistributedConfig(world_size=WORLD_SIZE, launcher=launcher))


def _torch_distributor(local_mode: bool) -> object:
    return peers.torch_distributor(nothing, world_size=WORLD_SIZE, local_mode=local_mode)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to launch, against TorchDistributor.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--master", default=f"local[{WORLD_SIZE}]", help="also local-cluster[2,1,1024], spark://...")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
