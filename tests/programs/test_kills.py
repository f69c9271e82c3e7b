"""Programs that lose a rank at a random moment end with the numbers, prints and files of a run that was not killed.

Five kills by default, and with ``-m soak`` one of every program for each seed and way to go on: ``python -m pytest -m
soak tests/programs/test_kills.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from lagom.result import Result
from lagom.run_state.random_streams import seed_everything
from tests.programs import judge
from tests.programs.expectations import CASES, Case
from tests.snapshots.slowed import slowly

WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "begins again": ({}, "runs/*/run.json"),
    "twins": ({"sleeping_twins": True}, "runs/*/run.json"),
    "snapshots": ({"snapshot_every_s": 0.05}, "runs/*/snapshots/snapshot-*.json"),
}
"""Settings, and the file that is there from when on a rank is killed."""
BY_DEFAULT = (
    *(("accumulation", "twins"), ("early_stopping", "snapshots"), ("tied", "begins again")),
    *(("averaging", "snapshots"), ("scaled", "twins")),
)
TELL_WHAT_IS_THERE = ("journal", "resumed")
"""Programs that write or print which files there are: after a loss also those that the lost attempt has left.

Twins find none such, since each new file ends them.
"""
SEEDS = range(2)


class Ended(NamedTuple):
    """A run that has ended: its result, output and files."""

    seconds: float
    result: Result
    printed: str
    files: dict[str, bytes]


def trial(case: Case, way: str, seed: int) -> Any:
    is_default = seed == 0 and (str(case), way) in BY_DEFAULT
    return pytest.param(case, way, seed, id=f"{case}-{way}-{seed}", marks=() if is_default else pytest.mark.soak)


@pytest.mark.parametrize(
    ("case", "way", "seed"),
    [trial(case, way, seed) for way in WAYS for case in CASES for seed in SEEDS],
)
def test_a_killed_rank_changes_nothing(case: Case, way: str, seed: int) -> None:
    draw = random.Random(f"{case} {way} {seed}")
    was_killed = judge_kill(case, way, draw, world_size=draw.choice([2, 3]), launcher="local")
    assert was_killed or (str(case), way) not in BY_DEFAULT  # of some programs there is no snapshot


@pytest.mark.soak  # tests/snapshots/test_resume.py shows it by default
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_killed_run_goes_on_with_a_rank_less(case: Case) -> None:
    draw = random.Random(str(case))
    world_size, launcher = draw.choice([2, 3]), "local"
    wanted = plain_run(case, world_size=world_size, launcher=launcher)
    with killing(draw.randrange(world_size), WAYS["snapshots"][1], draw.uniform(0.0, 0.5) * wanted.seconds) as kills:
        settings = WAYS["snapshots"][0] | {"world_size": world_size, "launcher": launcher, "max_failures": 0}
        found = run(case, goes_on=lambda runs: experiment.resume(runs, world_size=world_size - 1), **settings)
    if not kills:
        pytest.skip("no rank was killed: the run had no snapshot, or ended before")
    assert judge.differences(found.result.value, wanted.result.value) == []
    if str(case) not in TELL_WHAT_IS_THERE:
        assert judge.file_differences(found.files, wanted.files) == []


def test_the_programs_by_default_are_among_all() -> None:
    assert {name for name, _ in BY_DEFAULT} <= {str(case) for case in CASES}


def judge_kill(case: Case, way: str, draw: random.Random, **where: Any) -> bool:
    """Compare a run of a program that is killed with one that is not; return whether it lived until the kill."""
    wanted = plain_run(case, **where)
    settings, first = WAYS[way]
    rank, after_s = draw.randrange(where["world_size"]), draw.uniform(0.0, 0.8) * wanted.seconds
    for share in (1.0, 0.3, 0.0):
        with killing(rank, first, share * after_s) as kills:
            found = run(case, **where, **settings)
        if kills:
            break
    assert len(found.result.failures) <= len(kills)  # a rank may have ended as it was killed
    # After a snapshot, the first calls of a model run as at a start: whole, and with gradients that are averaged.
    tolerance = judge.TOLERANCE if way == "snapshots" else 0.0
    assert judge.differences(found.result.value, wanted.result.value, tolerance=tolerance) == []
    has_twins = way == "twins" and all("batch" in failure["resumed_from"] for failure in found.result.failures)
    if has_twins or not found.result.failures or str(case) not in TELL_WHAT_IS_THERE:
        assert judge.text_differences(found.printed, wanted.printed) == []
        assert judge.file_differences(found.files, wanted.files) == []
    return bool(kills)


@cache
def plain_run(case: Case, **where: Any) -> Ended:
    """A run that is not killed."""
    return run(case, **where)


def run(case: Case, goes_on: Callable[[Path], Result] | None = None, **settings: Any) -> Ended:
    """Run a program in a folder of its own; if it loses a rank for good, ``goes_on`` gets the folder of the run."""
    train = partial(slowly, judge.PROGRAMS[case.program].train, dict(case.options))
    seed_everything(0)
    start = time.monotonic()
    with judge.scratch() as folder:
        config = TorchDistributedConfig(run_dir=folder / "runs", **settings)
        try:
            result = experiment.lagom(train, config)
        except RankError:
            assert goes_on is not None
            (lost,) = (folder / "runs").iterdir()
            result = goes_on(lost)
        assert result.run_dir is not None
        printed = (result.run_dir / "rank-0.log").read_text()
        files = {name: data for name, data in judge.files_in(folder).items() if not name.startswith("runs/")}
        return Ended(time.monotonic() - start, result, printed, files)


@contextmanager
def killing(rank: int, first: str, after_s: float) -> Iterator[list[int]]:
    """Kill the process of ``rank`` of the run that begins, if it lives for so long after there is a file ``first``."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not list(Path().glob(first)):
            if over.wait(0.005):
                return
        over.wait(after_s)
        while not over.wait(0.005):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no rank has begun yet, or it has ended
                (path,) = Path("runs").glob("*/run.json")
                pid = json.loads(path.read_text())["ranks"][str(rank)]["pid"]
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
