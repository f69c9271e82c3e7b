"""``lagom run``: a script behaves on its ranks as under plain python."""

from __future__ import annotations

import functools
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

import lagom
from lagom import cli
from lagom.program.script import Script
from lagom.program.sources import modules_zip

LagomRun: TypeAlias = Callable[..., tuple[int, str, str]]
"""Takes arguments; returns exit status, standard output and standard error."""

PROGRAM = """
import argparse, pickle, sys, torch
from beside import SLOPE

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, dtype=torch.float64)
    def forward(self, x):
        return self.layer(x)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--fail")
    args = parser.parse_args()
    torch.manual_seed(3)
    x = torch.rand(25, 1, dtype=torch.float64)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, SLOPE * x), batch_size=4, shuffle=True)
    for epoch in range(args.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert pickle.loads(pickle.dumps(model)).__class__ is Line
    torch.save(model.state_dict(), "model.pt")
    print("trained", __name__, __file__, sys.argv)
    if args.fail:
        raise RuntimeError(args.fail)

if __name__ == "__main__":
    main()
"""
BY_HAND = (
    PROGRAM.replace("    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "")
    .replace("optimizer.zero_grad()", "model.zero_grad()")
    .replace("optimizer.step()", "[p.data.sub_(p.grad, alpha=0.1) for p in model.parameters()]")
)
"""The same without an optimizer, for which plain Python imports Dynamo: that takes longer than all else."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the script, and a module beside it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("SLOPE = 3.0\n")
    return tmp_path


def started(folder: Path, *command: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of Python with these arguments, in ``folder``."""
    root = str(Path(cli.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def lagom_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> LagomRun:
    """``lagom run`` on two ranks, called in this process as if begun in ``folder``."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", list(sys.path))

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return cli.main(["run", "-n", "2", *arguments]), *capfd.readouterr()

    return call


@pytest.mark.soak  # tests/test_prints.py and tests/programs/test_scripts.py run such scripts by default
def test_a_script_prints_and_saves_on_two_ranks_what_plain_python_does(folder: Path, lagom_run: LagomRun) -> None:
    (folder / "program.py").write_text(BY_HAND)
    said = f"trained __main__ {folder / 'program.py'} ['program.py', '--epochs', '2']\n"
    assert started(folder, "program.py", "--epochs", "2") == (0, said, "")
    plain = torch.load(folder / "model.pt")
    (folder / "model.pt").unlink()
    status, out, _ = lagom_run("program.py", "--epochs", "2")
    assert (status, out) == (0, said)
    for name, value in torch.load(folder / "model.pt").items():
        torch.testing.assert_close(value, plain[name], rtol=1e-12, atol=1e-13)


def test_exit_status_and_traceback_are_the_scripts(folder: Path, lagom_run: LagomRun) -> None:
    path = folder / "program.py"
    status, _, error = lagom_run("program.py", "--fail", "out of luck")
    assert status == 1
    assert error.rstrip().endswith("RuntimeError: out of luck")
    assert f'File "{path}", line' in error
    assert "lagom/" not in error
    assert lagom_run("program.py", "--epochs", "many")[0] == 2  # argparse's own status


UNCLOSED = """
import csv, gzip, os, sys
assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)) and __annotations__ == {}
rows = csv.writer(open("rows.csv", "w"))
rows.writerow(["é", 1])
packed = gzip.open("packed.gz", "wt")
packed.write("x" * 10)
raw = open("raw.bin", "wb")
raw.write(b"raw")
"""


@pytest.mark.parametrize("end", ["", pytest.param("sys.exit(3)", marks=pytest.mark.soak), "raise RuntimeError"])
def test_files_that_a_script_leaves_open_are_written_at_its_end(folder: Path, end: str, lagom_run: LagomRun) -> None:
    (folder / "program.py").write_bytes(f"# -*- coding: latin-1 -*-\n{UNCLOSED}{end}\n".encode("latin-1"))
    files = []
    for how in (functools.partial(started, folder), lagom_run):
        status, _, error = how("program.py")
        assert (status == 0) == (end == ""), error
        assert ("RuntimeError" in error) == ("RuntimeError" in end), error
        assert gzip.decompress((folder / "packed.gz").read_bytes()) == b"x" * 10
        files.append([(folder / name).read_bytes() for name in ("rows.csv", "raw.bin")])
        for name in ("rows.csv", "raw.bin", "packed.gz"):
            (folder / name).unlink()
    plain, found = files
    assert found == plain


@pytest.mark.parametrize(
    ("code", "status"), [pytest.param("None", 0, marks=pytest.mark.soak), ("5", 5), ("'a reason'", 1)]
)
def test_sys_exit_is_the_scripts_exit_status(folder: Path, code: str, status: int, lagom_run: LagomRun) -> None:
    (folder / "program.py").write_text(f"import sys\nsys.exit({code})\n")
    got, _, error = lagom_run("program.py")
    assert got == status
    assert ("a reason" in error) == (status == 1)


def test_a_rank_that_is_killed_is_named(folder: Path, lagom_run: LagomRun) -> None:
    (folder / "program.py").write_text("import os, lagom\nprint('hello')\nlagom.rank() or os.kill(os.getpid(), 9)\n")
    status, _, error = lagom_run("--max-failures", "0", "program.py")
    assert status == 1
    assert "lagom: rank 0 was killed by SIGKILL" in error
    assert "hello" in error  # its last words


@pytest.mark.soak  # a test below has a module whose imports travel
def test_modules_that_a_script_imports_travel_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    assert b"beside.py" in modules_zip(Script.read(folder / "program.py", []))


@pytest.mark.soak
def test_verify_lets_a_faithful_script_run_and_ends_an_unfaithful_one_with_status_3(
    folder: Path, lagom_run: LagomRun
) -> None:
    verified = ("--verify", "--batches", "split", "program.py")
    status, out, error = lagom_run(*verified)
    assert (status, out) == (0, f"trained __main__ {folder / 'program.py'} ['program.py']\n")
    assert "The ranks do what one process does." in error
    (folder / "program.py").write_text(
        PROGRAM.replace("mse_loss(model(inputs), targets)", "mse_loss(model(inputs), targets, reduction='sum')")
    )
    (folder / "model.pt").unlink()
    status, out, error = lagom_run(*verified)
    assert (status, out) == (3, "")
    assert "needs batches='whole'" in error
    assert not (folder / "model.pt").exists()


def test_a_timeline_is_written_where_it_is_asked_for(folder: Path, lagom_run: LagomRun) -> None:
    status, _, error = lagom_run("--run-dir", "runs", "--timeline-file", "trace.json", "program.py")
    assert status == 0, error
    (kept,) = (folder / "runs").iterdir()
    assert (kept / "timeline.json").read_bytes() == (folder / "trace.json").read_bytes()
    names = {event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert {"Line", "backward", "SGD.step", "wait for data"} <= names


def notebook(*cells: str, language: str = "python") -> str:
    """A notebook with a cell of text and these cells of code."""
    texts = [{"cell_type": "markdown", "source": ["# no code"]}]
    texts += [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"nbformat": 4, "metadata": {"kernelspec": {"language": language}}, "cells": texts})


def test_the_cells_of_a_notebook_run_one_after_another_on_every_rank(folder: Path, lagom_run: LagomRun) -> None:
    head = "%matplotlib inline\nfrom __future__ import annotations\nimport pickle\nfrom beside import SLOPE\n"
    body = "%%time\nimport lagom\nclass Box:\n    slope: Unknown = SLOPE\n%time box = pickle.loads(pickle.dumps(Box()))"
    tail = 'display(box.slope, lagom.world_size())\nif FAIL:\n    raise RuntimeError("in the third")'
    for fail in (False, True):
        cells = (head + f"FAIL = {fail}", body, tail)
        (folder / "n.ipynb").write_text(notebook(*cells))
        status, out, error = lagom_run("n.ipynb")
        assert (status, out) == (int(fail), "3.0 2\n"), error
    assert f'File "{folder / "n.ipynb"}, code cell 3", line 3, in <module>\n    raise RuntimeError("in' in error
    assert "lagom/" not in error


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bash.ipynb", notebook("x = 1", "\n%%bash\nls"), "code cell 2, line 2: only IPython can run '%%bash'"),
        ("pip.ipynb", notebook("x = 1\n!pip install y"), "code cell 1, line 2: only IPython can run '!pip install y'"),
        ("list.ipynb", notebook("files = !ls"), "only IPython can run 'files = !ls'"),
        ("r.ipynb", notebook("x <- 1", language="R"), "is a notebook of R; lagom runs Python"),
        ("old.ipynb", '{"worksheets": []}', "is no notebook of format 4"),
        ("cut.ipynb", '{"cells": [', "is no notebook: "),
        ("model.pt", "PK\0\1", "'model.pt' is no Python script: it has bytes that are no text"),
        ("latin.py", b"x = '\xe9'", "latin.py"),
        ("folder", None, "'folder' is a folder; name a script in it"),
        ("nowhere.py", "", "there is no script 'nowhere.py' here"),
        ("-m nowhere.at.all", None, "there is no module 'nowhere.at.all' in Python here"),
        ("-m math", None, "there is no module 'math' in Python here"),
        ("", None, "there is nothing to run; want a script, as in: lagom run -n 4 train.py"),
    ],
)
def test_what_is_no_script_is_one_line(
    name: str,
    content: str | bytes | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "folder").mkdir()
    if content:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    status = cli.main(["run", *name.split()])
    error = capsys.readouterr().err
    assert said in error
    if not isinstance(content, bytes):  # which python calls a syntax error
        assert (status, error.count("\n"), error[:7]) == (2, 1, "lagom: ")


@pytest.mark.parametrize("name", ["bad.py", "bad.ipynb", "train.sh"])
def test_a_syntax_error_is_told_as_python_tells_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    text = "x = 1\nif x\n    pass\n"
    (tmp_path / name).write_text(notebook(text) if name.endswith("ipynb") else text)
    assert cli.main(["run", name]) == 1
    where = str(tmp_path / name) + (", code cell 1" if name.endswith("ipynb") else "")
    error = capsys.readouterr().err
    assert error.startswith(f'  File "{where}", line 2\n    if x\n')
    assert error.splitlines()[-1] == "SyntaxError: expected ':'"


def test_a_module_runs_as_python_runs_it(folder: Path, lagom_run: LagomRun) -> None:
    package = folder / "own" / "inner"
    package.mkdir(parents=True)
    (folder / "own" / "__init__.py").write_text("LOADED = []\n")
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("from beside import SLOPE\n")
    text = "import sys\nfrom .base import SLOPE\nfrom .. import LOADED\n"
    text += "print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], SLOPE, LOADED)\n"
    (package / "__main__.py").write_text(text)
    plain = started(folder, "-m", "own.inner", "--epochs", "3")
    assert plain[0] == 0, plain
    status, out, error = lagom_run("-m", "own.inner", "--epochs", "3")
    assert (status, out) == (0, plain[1]), error
    sys.path.insert(0, str(folder))  # a list of this test's
    assert b"own/inner/base.py" in modules_zip(Script.of_module("own.inner", []))
    assert "own" not in sys.modules


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"lagom {lagom.__version__}\n")


def test_options_of_the_script_before_it_are_told_where_to_go(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in (
        (["run", "--lr", "3", "train.py"], "unrecognized arguments: --lr; options of the script go behind it\n"),
        (["run", "--lr=3", "-m", "train"], "unrecognized arguments: --lr=3; options of the script go behind it\n"),
        (["runs", "--lr"], "unrecognized arguments: --lr\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        assert capsys.readouterr().err.endswith(hint)
