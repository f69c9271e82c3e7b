"""``verify`` over every program: what "split" does not give is flagged, and the setting that gives it is named."""

from __future__ import annotations

import functools

import pytest

from lagom.config import TorchDistributedConfig
from lagom.errors import VerificationError
from lagom.extensions.verify.rehearsals import verify
from lagom.extensions.verify.verification import Verification
from lagom.launch import choose
from lagom.plan import plan
from lagom.program.signature import Call
from tests.programs import judge
from tests.programs.expectations import CASES, Case

RANDOM_ALONE = ("attention", "checkpointed-dropout=0.2", "siamese", "uncertainty")
"""Programs that differ with "split" only by dropout or draws in ``__getitem__``, which ``verify`` says."""


QUICK = ("until",)
"""Programs that every test run goes through; the others with ``pytest -m soak``.

``test_rehearsals.py`` has the other verdicts: that ranks agree, sums, and draws.
"""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.program in QUICK else pytest.mark.soak, id=str(case)) for case in CASES],
)
def test_a_program_is_told_what_is_right_for_it(case: Case) -> None:
    if case.split != "equal" or case.prints == "own":
        draws = str(case) in RANDOM_ALONE
        told = (
            "Not the numbers of one process"
            if draws
            else "Not what one process shows"
            if case.split == "equal"
            else "This program needs"
        )
        with pytest.raises(VerificationError) as error:
            rehearsed(case)
        text = " ".join(str(error.value).split())
        assert told in text
        assert "with batches='whole' it agrees" in text or "needs batches='whole'" in text
        return
    found = rehearsed(case)
    assert found.verdict == "agrees"
    assert ("no faster" in found.told) == (not case.shared)


def rehearsed(case: Case) -> Verification:
    """``verify`` of the program on two ranks, "split"."""
    launcher = choose("local")
    function = functools.partial(judge.PROGRAMS[case.program].train, **case.options)
    call = Call(function=function, provided={"hparams": {}})
    the_plan = plan(TorchDistributedConfig(launcher="local", world_size=2, batches="split", seed=0), launcher.cluster())
    with judge.scratch() as folder:
        try:
            return verify(launcher, the_plan, call)
        finally:
            assert not judge.files_in(folder)
