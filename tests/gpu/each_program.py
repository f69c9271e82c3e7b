"""Each ordinary program alone, on ranks that share a GPU, against one plain process on the CPU.

``python -m tests.gpu.each_program --processes 12`` prints one line for each program of tests/programs: "equal" to the
plain run; "as one rank" on the GPU, which draws other random numbers than the CPU, and rounds in another way; or what
is wrong. In the tests of tests/programs, many programs run on the same ranks, and the first that fails ends the rest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ |= {
    "LAGOM_TEST_DEVICE": next(
        (
            {"test": "lagomtest", "shared-test": "lagomtest:0"}[b]
            for a, b in itertools.pairwise(sys.argv)
            if a == "--device"
        ),
        os.environ.get("LAGOM_TEST_DEVICE", "cuda:0"),
    ),
    "LAGOM_RUN_DIR": "",
}

import torch

from tests.programs import judge, test_short
from tests.programs.expectations import CASES, Case
from tests.rank_processes import RankFailedError

Runner = Callable[..., judge.Run]


def programs() -> Iterator[tuple[str, Runner, int]]:
    """Yield each program's name, a function that runs it on a number of ranks or plainly, and the number of ranks."""
    for file, found in test_short.PROGRAMS.items():
        for name, program in found.items() if file != "compiled" else ():
            yield f"{file}.{name}", partial(run_short, program), 3 if file in test_short.ON_THREE_RANKS else 2
    for case in CASES:
        if case.split != "error":
            yield str(case), partial(run_case, case), 2


def run_short(program: test_short.Program, world_size: int, *, plain: bool = False) -> judge.Run:
    settings: dict[str, Any] = {"patches": False} if plain else {"batches": "whole", "always_slices": True}
    return judge.one_after_another({"it": program}, world_size, **settings)["it"]


def run_case(case: Case, world_size: int, *, plain: bool = False) -> judge.Run:
    if plain:
        return judge.plainly(case.program, case.options)
    settings: dict[str, Any] = {"batches": "whole", "evaluation": "gathered", "always_slices": True}
    return judge.on_ranks(case.program, case.options, world_size, **settings)


def differences(run: judge.Run, wanted: judge.Run) -> list[str]:
    """List how the ranks of ``run`` differ from the first of ``wanted``."""
    first, found = wanted.ranks[0], judge.file_differences(run.files, wanted.files)
    for rank in run.ranks:
        found += judge.differences(rank.value, first.value) + judge.text_differences(rank.text, first.text)
        found += ["other batches"] * (rank.passes != first.passes)
    return found


def verdicts_together(file: str, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield a line about each of a file's short programs, which run on the same ranks; each alone if one fails."""
    chosen = {name: test_short.PROGRAMS[file][name] for name in names}
    world_size = 3 if file in test_short.ON_THREE_RANKS else 2
    try:
        plain = judge.one_after_another(chosen, 1, patches=False)
        ranks = judge.one_after_another(chosen, world_size, batches="whole", always_slices=True)
    except RankFailedError:
        for name, program in chosen.items():
            yield name, verdict(partial(run_short, program), world_size)
        return
    for name, program in chosen.items():
        is_equal = not differences(ranks[name], plain[name])
        yield name, "equal" if is_equal else verdict(partial(run_short, program), world_size)


def verdict(run: Runner, world_size: int) -> str:
    """Run a program, and return a line about it."""
    try:
        plain = run(1, plain=True)
    except RankFailedError as error:
        return f"fails plainly: {_last_line(error)}"
    try:
        ranks = run(world_size)
        if not (to_cpu := differences(ranks, plain)):
            return "equal"
        to_one = differences(ranks, run(1))
    except RankFailedError as error:
        return f"fails: {_last_line(error)}"
    return f"as one rank: {to_cpu[0]}" if not to_one else f"differs: {to_cpu[0]}; from one rank: {to_one[0]}"


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300]


def main() -> None:
    """Run the programs whose names contain one of the given texts, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--device", choices=("test", "shared-test"), help="test devices in place of a GPU, for each rank or shared"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=int, help="only each of so many processes' programs, from this one on")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no program after so many seconds")
    parser.add_argument("--together", help="a file of tests/programs/short, whose programs run on the same ranks")
    args = parser.parse_args()
    if args.together:
        torch.set_num_threads(1)
        for name, told in verdicts_together(args.together, args.names or list(test_short.PROGRAMS[args.together])):
            print(f"{args.together}.{name}: {told}", flush=True)
        return
    if args.part is None and args.processes > 1:
        again = [sys.executable, "-m", "tests.gpu.each_program", *sys.argv[1:], "--part"]
        for process in [subprocess.Popen([*again, str(part)]) for part in range(args.processes)]:
            process.wait()
        return
    torch.set_num_threads(1)
    end, counts = time.monotonic() + args.limit_s, Counter[str]()
    chosen = [one for one in programs() if not args.names or any(name in one[0] for name in args.names)]
    for name, run, world_size in chosen[args.part or 0 :: args.processes]:
        told = verdict(run, world_size) if time.monotonic() < end else "not run: out of time"
        counts[told.partition(":")[0]] += 1
        print(f"{name} on {world_size}: {told}", flush=True)
    print(f"part {args.part or 0}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
