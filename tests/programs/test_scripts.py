"""Every program as a script: ``lagom run -n 2 program.py`` against ``python program.py``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lagom import cli
from tests.programs import judge
from tests.programs.expectations import CASES, Case

FIRST = {case.program: case for case in reversed(CASES)}
"""The first case of each program: it is called with what the script takes when it gets no arguments."""


@pytest.mark.parametrize("case", FIRST.values(), ids=FIRST)
def test_a_script_on_two_ranks(case: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    text, files = judge.as_script(case.program, [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with judge.scratch() as folder:
        status = cli.main(["run", "-n", "2", str(judge.HERE / f"{case.program}.py")])
        found = judge.files_in(folder)
    printed, errors = capfd.readouterr()
    if case.split == "error":
        assert status == 1
        assert case.why in errors
        return
    assert status == 0, errors
    assert judge.words(printed) == judge.words(text)
    assert found.keys() == files.keys()
    if case.split == "equal":
        for name, kind in vars(judge.PROGRAMS[case.program]).items():
            if isinstance(kind, type):  # a whole module that was saved is of a class of __main__
                monkeypatch.setattr(sys.modules["__main__"], name, kind, raising=False)
        assert judge.file_differences(found, files) == []
        assert (judge.text_differences(printed, text) != []) == (case.prints == "own")


@pytest.mark.parametrize(("program", "arguments"), [("language", []), ("sums", ["--epochs", "1"])])
def test_one_rank_is_python(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in processes of their own, as typed: the same text and the same bytes."""
    found = []
    for python in ([], ["-m", "lagom.cli", "run", "-n", "1"]):
        with judge.scratch() as folder:
            done = subprocess.run(
                [sys.executable, *python, str(judge.HERE / f"{program}.py"), *arguments],
                env=os.environ | {"PYTHONPATH": str(judge.HERE.parents[1]), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=True,
            )
            found.append((done.stdout, judge.files_in(folder)))
    assert found[0] == found[1]
    assert found[0] == judge.as_script(program, arguments)  # so that it may stand for python above
