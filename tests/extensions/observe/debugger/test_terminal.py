"""``lagom debug`` and ``breakpoint()`` in a terminal of their own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.extensions.observe.debugger.messages import DebugAnswer, DebugBegin, DebugText
from lagom.extensions.observe.debugger.terminal import DebugTerminal
from lagom.plan import plan
from lagom.wire.messages import Hold, Stopping
from tests.integration import programs
from tests.person import Person, person
from tests.terminal import ROOT, Terminal

__all__ = ["person"]

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


@pytest.mark.soak
def test_a_script_stops_where_it_fails_on_the_chosen_rank(folder: Path) -> None:
    with Terminal(["-m", "lagom", "debug", "--rank", "1", "-n", "2", "script.py", "fail"], folder) as terminal:
        terminal.expect("rank 1 of 2 has failed, and is in the debugger")
        terminal.expect('raise ValueError("no rows")\n(Pdb) ')
        terminal.type("p secret")
        terminal.expect("41\n(Pdb) ")
        terminal.type("q")
        assert terminal.end() == 1
    assert terminal.shown.count("ValueError: no rows") == 2


@pytest.mark.soak  # tests/extensions/observe/notebooks/test_debugger.py interrupts such a run by default
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


again = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        again(
            ["--rank", "7", "script.py", "fail"], "lagom: debug is rank 7, but the run has 2 ranks, from rank 0 on\n"
        ),
        again(
            ["--rank", "-1", "script.py", "fail"], "lagom: debug is -1; want 'first', the number of a rank, or None\n"
        ),
        (["nothing.py"], "lagom: there is no script 'nothing.py' here"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, arguments: list[str], text: str) -> None:
    with Terminal(["-m", "lagom", "debug", "-n", "2", *arguments], folder) as terminal:
        assert terminal.end() == 2
    assert terminal.shown.startswith(text)


@pytest.mark.soak  # test_rank_debugger.py shows it by default
def test_a_batch_job_is_told_that_nobody_can_type(folder: Path) -> None:
    words = [sys.executable, "-m", "lagom", "debug", "-n", "2", "script.py", "stop"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=env
    )
    assert done.returncode == 2
    assert done.stderr.startswith("lagom: debug is 'first', but nobody can type at the driver")


class Channel:
    """Keeps what the driver sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.waiting: list[Callable[[], None]] = []

    def send(self, task: int, message: Any) -> None:
        self.sent.append(message)

    def broadcast(self, message: Any) -> None:
        self.sent.append(message)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        self.waiting.append(function)


def driver(debug: Any = None) -> tuple[Channel, DebugTerminal, list[Any]]:
    """Return a terminal for two ranks, with its channel and the messages that it shows."""
    channel: Any = Channel()
    shown: list[Any] = []
    two = plan(TorchDistributedConfig(world_size=2, debug=debug), Cluster(launcher="local", slots=2))
    return channel, DebugTerminal(two, channel, shown.append), shown


def test_only_one_failure_gets_a_turn(person: Person) -> None:
    channel, terminal, shown = driver("first")
    for rank in (0, 1):
        assert terminal.take(rank, DebugBegin(rank=rank, failed=True, consequence=False))
    assert channel.sent == [Hold(on=True), DebugAnswer(rank=0)]
    terminal.take(0, DebugText(rank=0, step="end", text=""))
    assert channel.sent[-1] == Hold(on=False)
    assert [one.step for one in shown] == ["turn", "end"]
    assert not terminal.take(0, Stopping())


def test_a_request_that_waits_for_the_chosen_rank_ends_with_the_run(person: Person) -> None:
    channel, terminal, shown = driver(1)
    terminal.take(0, DebugBegin(rank=0, failed=True, consequence=False))
    terminal.close()
    (later,) = channel.waiting
    later()
    assert (channel.sent, shown) == ([], [])


def test_the_end_of_the_run_ends_an_open_prompt(person: Person) -> None:
    channel, terminal, shown = driver()
    written: list[str] = []

    def never() -> str:
        threading.Timer(0.1, terminal.close).start()
        time.sleep(100)
        return "n"

    person.types("n", never)
    terminal.take(0, DebugBegin(rank=0, failed=False, consequence=False))
    for _ in range(2):
        terminal.take(0, DebugText(rank=0, step="line", text="(Pdb) "))
        terminal.show(shown[-1], written.append, written.append)
    assert channel.sent == [Hold(on=True), DebugAnswer(rank=0), DebugAnswer(rank=0, line="n\n")]
    terminal.show(shown[1], written.append, written.append)
    assert len(channel.sent) == 3
