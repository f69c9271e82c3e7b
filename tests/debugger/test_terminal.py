"""``lagom debug`` and ``breakpoint()`` in a terminal of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration import programs
from tests.terminal import ROOT, Terminal

SCRIPT = """
import os
import sys
import lagom
import torch

def train(kind):
    secret = 40 + lagom.rank()
    os.system(f"echo {os.getpid()} > pid-{lagom.rank()}")  # there at once, unlike what a rank writes itself
    if kind == "stop":
        breakpoint()
    elif kind == "fail":
        raise ValueError("no rows")
    total = torch.ones(2, requires_grad=True)
    total.sum().backward()
    print("the end", secret)

train(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_stops_where_it_fails_on_the_chosen_rank(folder: Path) -> None:
    with Terminal(["-m", "lagom", "debug", "--rank", "1", "-n", "2", "script.py", "fail"], folder) as terminal:
        terminal.expect("rank 1 of 2 has failed, and is in the debugger")
        terminal.expect('raise ValueError("no rows")\n(Pdb) ')
        terminal.type("p secret")
        terminal.expect("41\n(Pdb) ")
        terminal.type("q")
        assert terminal.end() == 1
    assert terminal.shown.count("ValueError: no rows") == 2


def test_ctrl_c_ends_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal(["-m", "lagom", "run", "-n", "2", "script.py", "stop"], folder) as terminal:
        terminal.expect("(Pdb) ")
        pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(2)]
        start = time.monotonic()
        terminal.interrupt()
        assert terminal.end() == 130
        seconds = time.monotonic() - start
    while any(programs.alive(pid) for pid in pids):
        time.sleep(0.02)
    with capsys.disabled():
        print(f"\nthe run ended {seconds:.2f} s after Ctrl-C")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rank", "7", "script.py", "fail"], "lagom: debug is rank 7, but the run has 2 ranks, from rank 0 on\n"),
        (["--rank", "-1", "script.py", "fail"], "lagom: debug is -1; want 'first', the number of a rank, or None\n"),
        (["nothing.py"], "lagom: there is no script 'nothing.py' here"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, arguments: list[str], text: str) -> None:
    with Terminal(["-m", "lagom", "debug", "-n", "2", *arguments], folder) as terminal:
        assert terminal.end() == 2
    assert terminal.shown.startswith(text)


def test_a_batch_job_is_told_that_nobody_can_type(folder: Path) -> None:
    words = [sys.executable, "-m", "lagom", "debug", "-n", "2", "script.py", "stop"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=env
    )
    assert done.returncode == 2
    assert done.stderr.startswith("lagom: debug is 'first', but nobody can type at the driver")
