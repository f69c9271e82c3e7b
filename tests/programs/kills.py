"""Kills a rank of a program at a random moment, and compares the run with one that is not killed.

tests/programs/test_kills.py does so in runs that restart, tests/extensions/resume/test_program_kills.py in runs that
continue from snapshots.
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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from lagom.result import Result
from lagom.run_state.random_streams import seed_everything
from tests.programs import judge
from tests.programs.expectations import CASES, Case
from tests.programs.slowed import slowly

WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "restarts": ({}, "ranks"),
    "snapshots": ({"snapshot_every_s": 0.05}, "snapshots"),
}
"""Settings, and the key that is in run.json from when on a rank is killed."""
WITHOUT_LOADER = tuple(str(case) for case in CASES if not case.shared)
UNPROTECTED: dict[str, tuple[str, ...]] = {
    "restarts": (),
    "snapshots": (*WITHOUT_LOADER, "clamped", "spectral"),  # hooks of a parameter, and a parametrized module
}
"""Programs of which no snapshot can be taken: no rank of theirs is killed."""
TELL_WHAT_IS_THERE = ("journal", "resumed")
"""Programs that write or print which files there are: after a loss also those that the lost attempt has left."""
SEEDS = range(2)
SHARES = (1.0, 0.3, 0.0, 0.0)
"""Parts of the drawn time until the kill, which are tried in turn while a run ends before."""


class Ended(NamedTuple):
    """A run that has ended: its result, output and files."""

    seconds: float
    result: Result
    printed: str
    files: dict[str, bytes]
    num_lost: int
    facts: dict[str, Any]
    """Content of run.json at the end."""


def judge_seed(case: Case, way: str, seed: int) -> str:
    """Kill a rank at the moment that ``seed`` says; return from where the run continued."""
    draw = random.Random(f"{case} {way} {seed}")
    where: dict[str, Any] = {"world_size": draw.choice([2, 3]), "launcher": "local"}
    return judge_kill(case, way, draw, by_rows=seed % 2 == 1, **where)


def judge_kill(case: Case, way: str, draw: random.Random, *, by_rows: bool = False, **where: Any) -> str:
    """Compare a run of a program that is killed with one that is not; return from where it went on."""
    wanted = plain_run(case, by_rows, **where)
    found = killed_run(case, way, draw, wanted.seconds, by_rows=by_rows, **where)
    resumed_from = [failure["resumed_from"] for failure in found.result.failures]
    if str(case) in UNPROTECTED[way]:
        assert found.facts.get(WAYS[way][1]) is None
    else:
        assert resumed_from, "no rank was killed"
    assert way != "snapshots" or all("batch" in place for place in resumed_from)
    assert judge.differences(found.result.value[0], wanted.result.value[0], tolerance=0.0) == []
    if not resumed_from or str(case) not in TELL_WHAT_IS_THERE:
        assert found.printed == wanted.printed
        assert judge.text_differences(found.printed, one_process(case).ranks[0].text) == []
        assert judge.file_differences(found.files, wanted.files, tolerance=0.0) == []
        check_one_process(case, found)
    return ", ".join(resumed_from)


def killed_run(case: Case, way: str, draw: random.Random, seconds: float, **settings: Any) -> Ended:
    """A run that loses a rank at a random moment, or earlier if it has ended by then."""
    rank, after_s = draw.randrange(settings["world_size"]), draw.uniform(0.0, 0.8) * seconds
    protection, sign = WAYS[way]
    for share in SHARES:
        with killing(rank, sign, share * after_s) as kills:
            found = run(case, **settings, **protection)
        assert found.num_lost <= len(kills)  # a rank may have ended as it was killed
        if found.num_lost or str(case) in UNPROTECTED[way]:
            break
    return found


def check_one_process(case: Case, found: Ended) -> None:
    """Check that a run has the numbers and files of a plain process, and on each rank its samples, in their order."""
    plain = one_process(case)
    (seen,) = plain.ranks
    assert judge.differences(found.result.value[0], seen.value) == []
    assert judge.file_differences(found.files, plain.files) == []
    batches = list(chain.from_iterable(one.batches for one in seen.passes))
    for _, fetched in found.result.per_rank:
        assert fetched == batches


@cache
def one_process(case: Case) -> judge.Run:
    """The program in a process without lagom."""
    return judge.plainly(case.program, case.options)


@cache
def plain_run(case: Case, by_rows: bool, **where: Any) -> Ended:
    """A run that is not killed."""
    return run(case, by_rows, **where)


def run(case: Case, by_rows: bool = False, goes_on: Callable[[Path], Result] | None = None, **settings: Any) -> Ended:
    """Run a program in a folder of its own; if it loses a rank for good, ``goes_on`` gets the folder of the run."""
    # On Spark a driver hears of a snapshot later.
    pause_s = 0.1 if settings["launcher"] == "spark" else 0.03
    train = partial(slowly, judge.PROGRAMS[case.program].train, dict(case.options), by_rows=by_rows, pause_s=pause_s)
    seed_everything(0)
    start, num_lost = time.monotonic(), 0
    with judge.scratch() as folder:
        config = TorchDistributedConfig(run_dir=folder / "runs", **settings)
        try:
            result = experiment.lagom(train, config)
        except RankError:
            assert goes_on is not None
            (lost,) = (folder / "runs").iterdir()
            num_lost, result = 1, goes_on(lost)
        assert result.run_dir is not None
        printed = (result.run_dir / "rank-0.log").read_text()
        files = {name: data for name, data in judge.files_in(folder).items() if not name.startswith("runs/")}
        return Ended(time.monotonic() - start, result, printed, files, num_lost or len(result.failures), facts())


@contextmanager
def killing(rank: int, sign: str, after_s: float) -> Iterator[list[int]]:
    """Kill the process of ``rank`` of the run that begins, if it lives for so long after ``sign`` is in run.json."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not facts().get(sign):
            if over.wait(0.005):
                return
        over.wait(after_s)
        while not over.wait(0.005):
            with contextlib.suppress(OSError, KeyError):  # no rank has begun yet, or it has ended
                pid = facts()["ranks"][str(rank)]["pid"]
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


def facts() -> dict[str, Any]:
    """The run.json of the run that has begun; empty before."""
    for path in Path().glob("runs/*/run.json"):
        return dict(json.loads(path.read_text()))
    return {}
