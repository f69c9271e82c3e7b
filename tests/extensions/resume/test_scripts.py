"""Scripts of ``lagom run`` that are killed in their second epoch are as scripts that were not killed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom.cli import main
from lagom.program.script import Script
from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.extensions.resume.kills import kill_driver, killed
from tests.extensions.resume.scripts import BESIDE, LOOP, MAIN, ODD, PARTS, REFUSED
from tests.extensions.resume.test_idioms import resumed, taken
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
SCRIPTS = {"loop": (LOOP, ["1"], 0), "main": (MAIN, ["--lr", "0.05"], 3)}
"""Text, arguments and exit status of each script."""
OPTIONS = ["-n", "2", "--seed", "3", "--run-dir", "runs"]
ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
Plain = Callable[[str], tuple[str, str]]


def make(folder: Path, name: str) -> list[str]:
    """Write a script and the module beside it into ``folder``; return its path and arguments."""
    (folder / "beside.py").write_text(BESIDE)
    (folder / f"{name}.py").write_text(SCRIPTS[name][0])
    return [f"{name}.py", *SCRIPTS[name][1]]


@contextlib.contextmanager
def standard_output(fd: int) -> Iterator[None]:
    """Have this process and ranks write to the file ``fd`` for a while."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(fd, 1)
    try:
        with open(1, "w", closefd=False) as file, contextlib.redirect_stdout(file):
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Return the output of a script that is not killed, and the file that it writes."""

    @functools.cache
    def find(name: str) -> tuple[str, str]:
        folder = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch, open(folder / "shown", "w+") as shown:
            patch.chdir(folder)
            patch.setattr(sys, "path", list(sys.path))
            with standard_output(shown.fileno()):
                assert main(["run", *OPTIONS, *make(folder, name)]) == SCRIPTS[name][2]
        return (folder / "shown").read_text(), (folder / "rows.csv").read_text()

    return find


@pytest.mark.soak  # the tests below go on by default: in a function of a script, and in each kind of its statements
@pytest.mark.parametrize(
    ("name", "kind"), [("loop", "script"), ("main", "script"), ("main", "module"), ("loop", "notebook")]
)
def test_a_script_goes_on_when_a_rank_is_killed(
    name: str,
    kind: str,
    plain: Plain,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "slowly").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path, *arguments = make(tmp_path, name)
    if kind == "notebook":
        texts = Path(path).read_text().partition("points = ")
        cells = [{"cell_type": "code", "source": [text]} for text in (texts[0], texts[1] + texts[2])]
        path = f"{name}.ipynb"
        Path(path).write_text(json.dumps({"cells": cells}))
    program = ["-m", name] if kind == "module" else [path]
    with killed(tmp_path, rank=1):
        status = main(["run", *OPTIONS, "--snapshot-every", "0.1", *program, *arguments])
    assert status == SCRIPTS[name][2]
    shown = capfd.readouterr()
    assert re.search("the run continues from batch .* of epoch 2", shown.err)
    assert "restarts" not in shown.err
    assert (shown.out, (tmp_path / "rows.csv").read_text()) == plain(name)


@pytest.mark.parametrize("name", ["main", pytest.param("loop", marks=pytest.mark.soak)])  # the next test has a loop
def test_a_script_goes_on_elsewhere_when_its_driver_was_killed(
    name: str, plain: Plain, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "lagom", "run", *OPTIONS, "--snapshot-every", "0.1"]
    kill_driver([*command, *make(tmp_path, name)], tmp_path, ENV)
    (tmp_path / "beside.py").unlink()
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('the script is run again')")
    monkeypatch.chdir("/")
    (folder,) = (tmp_path / "runs").iterdir()
    assert main(["resume", str(folder), "-n", "3"]) == SCRIPTS[name][2]
    shown = capfd.readouterr()
    assert f"{name}.py has been edited since the run began" in shown.err
    assert "restarts" not in shown.err
    output, rows = plain(name)
    *before, last = output.splitlines()
    assert close(shown.out, "\n".join([*(one for one in before if re.match("epoch [12]", one)), last, ""]), 1e-11)
    assert close((tmp_path / "rows.csv").read_text(), rows, 1e-12)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])  # other batches
def test_a_script_with_all_that_scripts_have_goes_on_exactly(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts").mkdir()
    for name, text in PARTS.items():
        (tmp_path / "parts" / f"{name}.py").write_text(text)
    (tmp_path / "odd.py").write_text(ODD)
    script = Script.read(tmp_path / "odd.py", [])

    def plain(session: Session) -> Any:
        seed_everything(7)
        script()
        return repr(vars(sys.modules["__main__"])["found"])

    def first(session: Session) -> Any:
        points = taken(session, script, every)[1]
        return points.taken, list(points.reasons), repr(vars(sys.modules["__main__"])["found"])

    def go_on(session: Session, snapshot: Any) -> Any:
        later = resumed(session, script, snapshot)[1].taken
        return repr(vars(sys.modules["__main__"])["found"]), later

    (wanted,) = run_ranks(1, plain)
    ((snapshots, reasons, value),) = run_ranks(1, first)
    assert value == wanted
    assert all("lambda, comprehension or class body" in reason for reason in reasons), reasons
    for number, snapshot in enumerate(snapshots):
        ((value, later),) = run_ranks(1, functools.partial(go_on, snapshot=snapshot))
        assert value == wanted, number
    for snapshot in later:
        assert run_ranks(1, functools.partial(go_on, snapshot=snapshot))[0][0] == wanted


def test_what_a_script_has_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    (tmp_path / "refused.py").write_text(REFUSED)
    script = Script.read(tmp_path / "refused.py", [])
    (reasons,) = run_ranks(1, lambda session: list(taken(session, script)[1].reasons))
    parts = [
        "<module>()'s loop or block of line 24.gen (a generator) cannot be kept: section is a generator that has begun",
        "__main__.filled (a _lru_cache_wrapper) cannot be kept: filled is a cache that holds values",
        "__main__.connection (a Connection) cannot be kept",
        "forever (",
        "the script is inside of a statement at line 37 that cannot be resumed",
        "Body (",
    ]
    assert [part for part in parts if not any(part in reason for reason in reasons)] == []


def close(one: str, other: str, tolerance: float) -> bool:
    """Whether the texts are equal but for the last digits of their numbers."""
    number = re.compile(r"\d[\d.]*(?:e-?\d+)?")
    pairs = zip(map(float, number.findall(one)), map(float, number.findall(other)), strict=True)
    is_close = all(x == pytest.approx(y, rel=tolerance, abs=tolerance) for x, y in pairs)
    return is_close and number.sub("", one) == number.sub("", other)
