"""Every program as a script: ``lagom run -n 2 program.py`` against ``python program.py``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lagom import cli
from tests.programs import judge
from tests.programs.expectations import AS_SCRIPTS, CASES, Case

FIRST = {case.program: case for case in reversed(CASES)}
"""The first case of each program: it is called with what the script takes when it gets no arguments."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in AS_SCRIPTS else pytest.mark.soak) for name, case in FIRST.items()],
)
def test_a_script_on_two_ranks(case: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Use the right setting: "whole" if "split" does not give the numbers of one process."""
    whole = case.split != "equal"
    text, files = judge.as_script(case.program, [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with judge.scratch() as folder:
        settings = ["--batches", "whole" if whole else "split"]
        status = cli.main(["run", "-n", "2", *settings, str(judge.HERE / f"{case.program}.py")])
        found = judge.files_in(folder)
    printed, errors = capfd.readouterr()
    assert status == 0, errors
    for name, kind in vars(judge.PROGRAMS[case.program]).items():
        if isinstance(kind, type):  # a whole module that was saved is of a class of __main__
            monkeypatch.setattr(sys.modules["__main__"], name, kind, raising=False)
    assert judge.file_differences(found, files) == []
    if whole or case.prints == "equal":
        assert judge.text_differences(printed, text) == []
    else:
        assert judge.words(printed) == judge.words(text)


def test_a_script_that_cannot_be_split_exits_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with judge.scratch():
        status = cli.main(["run", "-n", "2", "--batches", "split", str(judge.HERE / "until.py")])
    assert status == 1
    assert "the ranks are at different points of the program" in capfd.readouterr().err


@pytest.mark.soak  # test_programs.py has one rank by default, and the test above scripts
def test_one_rank_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run both as a user would, in processes of their own: text and bytes are equal."""
    found = []
    for python in ([], ["-m", "lagom.cli", "run", "-n", "1"]):
        with judge.scratch() as folder:
            done = subprocess.run(
                [sys.executable, *python, str(judge.HERE / "language.py"), "--epochs", "1"],
                env=os.environ | {"PYTHONPATH": str(judge.HERE.parents[1]), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=True,
            )
            found.append((done.stdout, judge.files_in(folder)))
    assert found[0] == found[1]
    # So that it may stand for python above. By its numbers: the process that it is forked from has been through other
    # tests, of which the pickle of a whole module may tell.
    text, files = judge.as_script("language", ["--epochs", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "Model", judge.PROGRAMS["language"].Model, raising=False)
    assert text == found[0][0]
    assert judge.file_differences(files, found[0][1]) == []
