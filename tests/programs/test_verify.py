"""``verify`` over every program: what "split" does not give is flagged, and the setting that gives it is named."""

from __future__ import annotations

import functools

import pytest

from lagom.config import TorchDistributedConfig
from lagom.errors import VerificationError
from lagom.launchers import choose
from lagom.plan import plan
from lagom.verify.rehearsals import verify
from lagom.verify.verification import Verification
from tests.programs import judge
from tests.programs.expectations import CASES, Case

RANDOM_ALONE = ("attention", "checkpointed-dropout=0.2", "siamese", "uncertainty")
"""Of those that "split" does not give: nothing but dropout or draws in ``__getitem__`` differ, so they may run."""


QUICK = ("accumulation", "convolution", "early_stopping", "language", "siamese", "sums", "until")
"""Programs that every test run goes through; the others with ``pytest -m soak``."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.program in QUICK else pytest.mark.soak, id=str(case)) for case in CASES],
)
def test_a_program_is_told_what_is_right_for_it(case: Case) -> None:
    if case.split != "equal" and str(case) not in RANDOM_ALONE:
        with pytest.raises(VerificationError, match=r"This program needs batches='whole'"):
            rehearsed(case)
        return
    found = rehearsed(case)
    if case.split != "equal":
        assert found.verdict == "random"
    else:
        assert found.verdict == ("own" if case.prints == "own" else "agrees")
    if found.verdict != "agrees":
        assert "with batches='whole' it agrees" in found.told
    assert ("no faster" in found.told) == (not case.shared)


def rehearsed(case: Case) -> Verification:
    """``verify`` of the program on two ranks, "split"."""
    launcher = choose("local")
    function = functools.partial(judge.PROGRAMS[case.program].train, **case.options)
    call = {"function": function, "provided": {"hparams": {}}, "random": None}
    the_plan = plan(TorchDistributedConfig(launcher="local", world_size=2), launcher.cluster())
    with judge.scratch() as folder:
        try:
            return verify(launcher, the_plan, call)
        finally:
            assert not judge.files_in(folder)
