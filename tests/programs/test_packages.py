"""Programs for packages that the project does not need, in an environment with these: one process against ranks.

One command: pytest -m soak tests/programs/test_packages.py. The environment is made once, in pytest's cache; the
variable LAGOM_TEST_PACKAGES names the Python of another one. ``python -m benchmarks.programs`` makes a table of them.
"""

from __future__ import annotations

import faulthandler
import re

import pytest

from tests.package_runs import PROGRAMS, Run, differences, executed, tolerance
from tests.packages import python_with_packages

SETTINGS = ("default", "split", "whole")
_NO_TRAINING = r"called a model and ran no backward\(\): it was no training.*use batches='whole'"
SAID = {
    ("classifier_of_skorch", "split"): _NO_TRAINING,
    ("engines_of_ignite", "split"): _NO_TRAINING,
    ("engines_of_monai", "split"): _NO_TRAINING,
    ("model_of_keras", "split"): _NO_TRAINING,
    ("private_by_opacus", "split"): r"DivergenceError: the parameter .* no longer has the same values on all ranks",
}
"""The error where a setting is not for a program, by program and setting."""
SPLIT = {
    *(program for program, setting in SAID if setting == "split"),
    "best_by_trainer",
    "resumed_by_torchdata",
    "speech_of_transformers",
    "tensors_and_words",
}
"""Programs that run with "split" too."""
_LOSS = re.compile(r"""(['"])(train_loss|loss|total_flos)\1: ['"]?[\d.]+""")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(pytestconfig: pytest.Config) -> str:
    """The Python that has the packages."""
    return python_with_packages(pytestconfig)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("program", "setting"), [(p, s) for p in PROGRAMS for s in SETTINGS if s != "split" or p in SPLIT]
)
def test_ranks_give_what_one_process_gives_or_say_why_not(
    python: str, program: str, num_ranks: int, setting: str
) -> None:
    """Slice forwards with "whole" even where that does not pay."""
    faulthandler.cancel_dump_traceback_later()  # which would end the tests after two minutes
    plain = executed(python, program)
    assert plain.code == 0, plain.err
    options = [] if setting == "default" else ["--batches", setting]
    run = executed(python, program, "-n", str(num_ranks), *options, always_sliced=setting == "whole")
    if (program, setting) in SAID:
        assert run.code != 0
        assert re.search(SAID[program, setting], run.err), run.err
        return
    assert run.code == 0, run.err
    if setting == "split":
        run, plain = without_running_losses(run), without_running_losses(plain)
    assert differences(run, plain, tolerance(program)) == []


def without_running_losses(run: Run) -> Run:
    """Return a run without the training losses that it tells, which are those of rank 0's share of a batch."""
    texts = {
        name: _LOSS.sub("", content.decode()).encode() for name, content in run.files.items() if name.endswith(".json")
    }
    return run._replace(out=_LOSS.sub("", run.out), files=run.files | texts)
