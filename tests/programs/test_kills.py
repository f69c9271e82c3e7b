"""Programs that lose a rank at a random moment restart, and end with the numbers, prints and files of one process.

One kill by default, and with ``-m soak`` one of every program for each seed:
``python -m pytest -m soak tests/programs/test_kills.py``. Each test fails if its kill did not come while the run went
on. With ``--junitxml`` the report says of each kill from where the run continued.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.expectations import CASES, Case
from tests.programs.kills import SEEDS, UNPROTECTED, judge_seed

WAY = "restarts"
BY_DEFAULT = ("tied",)


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
