"""Compares collectives on one host: lagom's through shared memory, gloo's, and a plain copy of the bytes as the limit.

    python -m benchmarks.collectives [--ranks 2 4] [--sizes 4 4096 ...] [--only all_reduce] [--plot FILE.svg]

Each cell is the median of five rounds, in which the contenders take turns; a round's time is that of its slowest rank.
Each rank has one thread. "raw" calls lagom's exchange directly; "dist" and "gloo" are calls of torch.distributed over
the backends "lagom" and "gloo"; "ds" is DeepSpeed's op for sums in shared memory, if DeepSpeed is installed and the op
compiles (`pip install -c constraints.txt -e ".[deepspeed]"`; the first time takes minutes).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import shm_op
from lagom.exchange.native import native
from lagom.exchange.torch_backend.registration import register
from lagom.exchange.torch_backend.shared_group import SharedProcessGroup, whole_groups

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 100_000_000, 256 << 20]
ROUNDS = 5
ROUND_S = 0.15
"""Approximate seconds of a round, unless a single call takes longer."""
TARGETS = [(4 << 10, 100.0), (1 << 20, 8.0), (100_000_000, 4.0)]
"""Targets for all-reduce on 2 ranks: the bytes, and the factor by which it must be faster than gloo."""
Times = dict[tuple[str, int, str], float]
"""Seconds of a call, by collective, bytes and contender."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables; return 0 if the targets hold, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--only", nargs="+", default=[], help="collectives; all by default")
    parser.add_argument("--plot", type=Path, help="where to draw all-reduce on the first number of ranks, as SVG")
    args = parser.parse_args(argv)
    if native() is None:
        print("lagom was installed without its compiled part: there is nothing to compare", file=sys.stderr)
        return 1
    op = None
    try:
        op = shm_op.load()
    except Exception as error:
        print(f"DeepSpeed's op is left out: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
    held = True
    for number in args.ranks:
        times = measured(number, args.sizes, args.only, op)
        print(table(number, times))
        if number == 2:
            for line, holds in targets(times):
                held = held and holds
                print(f"{'holds' if holds else 'MISSED':7}{line}")
        if args.plot is not None and number == args.ranks[0]:
            args.plot.write_text(drawing(number, times))
    return 0 if held else 1


def measured(number: int, sizes: Sequence[int], only: Sequence[str] = (), op: Any = None) -> Times:
    """Run all contenders on ``number`` forked ranks; return the times of the slowest rank.

    Args:
        sizes: bytes of the tensors.
        only: collectives to measure; empty for all.
        op: DeepSpeed's op from ``shm_op.load``; None to leave it out.
    """
    context = multiprocessing.get_context("fork")
    found: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        shared = (number, sizes, only, op, folder, answers)
        ranks = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(number)]
        for process in ranks:
            process.start()
        for _ in ranks:
            for key, seconds in answers.get().items():
                found[key] = max(found.get(key, 0.0), seconds)
        for process in ranks:
            process.join()
        shm_op.clean(Path(folder).name)
    return found


def _rank(
    rank: int, number: int, sizes: Sequence[int], only: Sequence[str], op: Any, folder: str, answers: Any
) -> None:
    warnings.simplefilter("ignore")  # torch warns about its own deprecated names
    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number)
    near = dist.new_group(backend="lagom")
    assert isinstance(near, SharedProcessGroup)
    if op is not None:
        shm_op.join(op, rank, number, Path(folder).name)
    found: Times = {}
    for size in sizes:
        data = torch.ones(max(size // 4 // number, 1) * number if size >= 4 * number else 1)
        for name, calls in _calls(data, number, near).items():
            if only and name not in only:
                continue
            if name == "all_reduce" and op is not None:
                calls["ds"] = partial(torch.ops.deepspeed.inference_all_reduce_, torch.zeros_like(data))
            rounds = _rounds(calls, near)
            found |= {(name, size, contender): statistics.median(taken) for contender, taken in rounds.items()}
    answers.put(found)
    dist.destroy_process_group()


def _calls(data: torch.Tensor, number: int, near: SharedProcessGroup) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the calls to time, by collective and contender; the result of a gather has the size of ``data``."""
    near_data, copied = data.clone(), torch.empty_like(data)
    (memory,) = whole_groups(number)
    address, count = near_data.data_ptr(), near_data.numel()
    found: dict[str, dict[str, Callable[[], object]]] = {
        "all_reduce": {
            "lagom": lambda: memory.all_reduce(address, count, 1, 0),
            "dist lagom": lambda: dist.all_reduce(near_data, group=near),
            "dist gloo": lambda: dist.all_reduce(data),
            "copy": lambda: copied.copy_(near_data),
        },
        "broadcast": {
            "dist lagom": lambda: dist.broadcast(data, 0, group=near),
            "dist gloo": lambda: dist.broadcast(data, 0),
        },
    }
    if count % number == 0:
        part = torch.ones(count // number)
        found |= {
            "all_gather": {
                "dist lagom": lambda: dist.all_gather_into_tensor(copied, part, group=near),
                "dist gloo": lambda: dist.all_gather_into_tensor(copied, part),
            },
            "reduce_scatter": {
                "dist lagom": lambda: dist.reduce_scatter_tensor(part, data, group=near),
                "dist gloo": lambda: dist.reduce_scatter_tensor(part, data),
            },
            "all_to_all": {
                "dist lagom": lambda: dist.all_to_all_single(copied, data, group=near),
                "dist gloo": lambda: dist.all_to_all_single(copied, data),
            },
        }
    return found


def _rounds(calls: Mapping[str, Callable[[], object]], near: dist.ProcessGroup) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {contender: [] for contender in calls}
    repeats = {}
    for contender, call in calls.items():
        call()
        guess = torch.tensor(ROUND_S / _seconds(call, 3, near))
        dist.all_reduce(guess, dist.ReduceOp.MIN)  # all ranks must repeat equally often
        repeats[contender] = min(max(int(guess), 1), 3000)
    for _ in range(ROUNDS):
        for contender, call in calls.items():
            taken[contender].append(_seconds(call, repeats[contender], near))
    return taken


def _seconds(call: Callable[[], object], repeats: int, near: dist.ProcessGroup) -> float:
    dist.barrier(group=near)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def table(number: int, times: Times) -> str:
    """Return the table: a line for each collective and size."""
    lines = [
        f"{number} ranks",
        f"{'':16}{'bytes':>12}{'raw us':>11}{'dist us':>11}{'gloo us':>11}{'ds us':>11}{'copy us':>11}  ratios",
    ]
    for name, size, contender in times:
        if contender != "dist gloo":
            continue
        shown = [times.get((name, size, one)) for one in ("lagom", "dist lagom", "dist gloo", "ds", "copy")]
        cells = "".join(f"{'' if one is None else f'{1e6 * one:.1f}':>11}" for one in shown)
        raw, through, gloo, ds, copy = shown
        assert through is not None
        assert gloo is not None
        said = f"{gloo / through:8.1f}x gloo's speed"
        if raw is not None and copy is not None:
            said += f"; raw {gloo / raw:.0f}x, {raw / copy:.2f} copies"
        if raw is not None and ds is not None:
            said += f", {ds / raw:.1f}x DeepSpeed's"
        lines.append(f"{name:16}{size:12}{cells}  {said}")
    return "\n".join(lines)


def targets(times: Times) -> list[tuple[str, bool]]:
    """Return each target as text, and whether it holds."""
    found = []
    for size, wanted in TARGETS:
        gloo, raw = times.get(("all_reduce", size, "dist gloo")), times.get(("all_reduce", size, "lagom"))
        if gloo is not None and raw is not None:
            found.append((f"all_reduce of {size} bytes is {wanted:g} times as fast as gloo's", gloo >= wanted * raw))
    raw, copy = times.get(("all_reduce", TARGETS[-1][0], "lagom")), times.get(("all_reduce", TARGETS[-1][0], "copy"))
    if raw is not None and copy is not None:
        found.append(
            (f"all_reduce of {TARGETS[-1][0]} bytes takes at most 1.5 times as long as a copy", raw <= 1.5 * copy)
        )
    return found


def drawing(number: int, times: Times) -> str:
    """Return a plot of all_reduce as SVG: time against size, both axes logarithmic."""
    import math

    shown = {
        "dist gloo": ("gloo", "#c0392b"),
        "ds": ("DeepSpeed", "#8e44ad"),
        "dist lagom": ("lagom, dist", "#2980b9"),
        "lagom": ("lagom, raw", "#16a085"),
    }
    shown["copy"] = ("a copy", "#7f8c8d")
    lines = {one: [(s, t) for (n, s, c), t in times.items() if n == "all_reduce" and c == one] for one in shown}
    sizes = sorted({size for line in lines.values() for size, _ in line})
    left, top, width, height = 70, 30, 520, 300
    low, high = -7, 0  # powers of ten of a second

    def at(size: int, seconds: float) -> tuple[float, float]:
        x = math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0]) if len(sizes) > 1 else 0.5
        return left + width * x, top + height * (high - math.log10(seconds)) / (high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 390" font-family="sans-serif" font-size="12">',
        '<rect width="720" height="390" fill="white"/>',
        f'<text x="{left}" y="18">all_reduce of float32 on {number} ranks of one host: time against size</text>',
    ]
    for power in range(low, high + 1):
        y = at(sizes[0], 10.0**power)[1]
        label = {-7: "0.1 us", -6: "1 us", -5: "10 us", -4: "0.1 ms", -3: "1 ms", -2: "10 ms", -1: "0.1 s", 0: "1 s"}[
            power
        ]
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    before, y = -1000.0, top + height + 18
    for size in sizes:
        x = at(size, 1.0)[0]
        y = y + 14 if x - before < 48 and y == top + height + 18 else top + height + 18  # labels must not overlap
        before = x
        label = (
            f"{size} B" if size < 1024 else f"{size / 1024:.0f} KB" if size < 1 << 20 else f"{size / (1 << 20):.0f} MB"
        )
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{label}</text>')
    for one, (label, color) in shown.items():
        points = [at(*point) for point in sorted(lines[one])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        if points:
            end = 14 * ({"lagom": -1, "copy": 1}.get(one, 0))
            parts.append(
                f'<text x="{points[-1][0] + 8:.1f}" y="{points[-1][1] + 4 + end:.1f}" fill="{color}">{label}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
