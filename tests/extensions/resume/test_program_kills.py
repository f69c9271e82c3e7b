"""Programs that lose a rank at a random moment continue from a snapshot, with the numbers of one process.

Four kills by default, and with ``-m soak`` one of every program for each seed:
``python -m pytest -m soak tests/extensions/resume/test_program_kills.py``. See tests/programs/test_kills.py.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.result import Result
from tests.programs import judge
from tests.programs.expectations import CASES, Case
from tests.programs.kills import (
    SEEDS,
    TELL_WHAT_IS_THERE,
    UNPROTECTED,
    check_one_process,
    judge_seed,
    killed_run,
    plain_run,
)

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
WAY = "snapshots"
BY_DEFAULT = ("accumulation", "early_stopping", "averaging", "scaled")


def trial(case: Case, seed: int) -> Any:
    is_default = seed == 0 and str(case) in BY_DEFAULT
    return pytest.param(case, seed, id=f"{case}-{seed}", marks=() if is_default else pytest.mark.soak)


@pytest.mark.parametrize(("case", "seed"), [trial(case, seed) for case in CASES for seed in SEEDS])
def test_a_killed_rank_changes_nothing(case: Case, seed: int, record_property: Any) -> None:
    record_property("resumed_from", judge_seed(case, WAY, seed))


def test_the_programs_by_default_are_among_all() -> None:
    assert set(BY_DEFAULT) | set(UNPROTECTED[WAY]) <= {str(case) for case in CASES}


def test_ranks_are_killed_fifty_times() -> None:
    assert len(SEEDS) * (len(CASES) - len(UNPROTECTED[WAY])) >= 50


@pytest.mark.soak  # tests/extensions/resume/test_resume.py shows it by default
@pytest.mark.parametrize("case", [case for case in CASES if str(case) not in UNPROTECTED["snapshots"]], ids=str)
def test_a_killed_run_goes_on_with_a_rank_less(case: Case) -> None:
    draw = random.Random(str(case))
    where: dict[str, Any] = {"world_size": draw.choice([2, 3]), "launcher": "local"}
    wanted = plain_run(case, False, **where)

    def go_on(run_dir: Path) -> Result:
        return experiment.resume(run_dir, world_size=where["world_size"] - 1)

    found = killed_run(case, "snapshots", draw, wanted.seconds, goes_on=go_on, max_failures=0, **where)
    assert found.num_lost, "no rank was killed"
    assert judge.differences(found.result.value, wanted.result.value) == []
    if str(case) not in TELL_WHAT_IS_THERE:
        check_one_process(case, found)
