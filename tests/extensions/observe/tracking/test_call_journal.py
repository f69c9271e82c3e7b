"""``observe.tracking.call_journal``: an attempt after a loss gets the answers that the lost one has got."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lagom.extensions.observe.tracking.call_journal import CallJournal


class Program:
    """A program that makes calls of a service, which counts them."""

    def __init__(self, path: Path, num: int | None = None) -> None:
        """Begin a run; or go on from a snapshot behind ``num`` calls."""
        self.made: list[str] = []
        self.said: list[str] = []
        self.journal = CallJournal(str(path), self.said.append)
        if num is not None:
            self.journal.restore(num)

    def call(self, name: str, finish: Callable[[Any], Any] | None = None, fails: bool = False, **given: Any) -> Any:
        def make() -> str:
            if fails:
                raise KeyError(name)
            self.made.append(name)
            return f"answer {len(self.made)}"

        return self.journal.call(name, given, make, finish)


def test_calls_after_the_snapshot_are_not_made_twice(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    path.write_text("of an earlier run")
    lost = Program(path)
    answers = [
        lost.call("create_run", start_time=1, run_name="one"),
        *(lost.call("log", step=step) for step in range(3)),
    ]
    for _ in range(2):  # the second attempt is lost as well
        program = Program(path, 1)
        assert [program.call("log", step=step) for step in range(3)] == answers[1:]
        assert program.made == []
    assert program.call("log", step=3) == "answer 1"
    program = Program(path, 0)
    assert program.call("create_run", start_time=2, run_name="another") == answers[0]
    assert [program.call("log", step=step) for step in range(5)] == [*answers[1:], "answer 1", "answer 1"]
    assert program.said == []


def test_the_call_under_way_at_the_loss_is_finished_with_its_times(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    lost = Program(path)
    with pytest.raises(KeyError):
        lost.call("log", fails=True, step=0, start_time=5)
    with open(path, "a") as file:
        file.write('{"number": 1, "answ')  # half a line
    program, finished = Program(path, 0), list[Any]()
    program.call("log", finished.append, step=0, start_time=7)
    program.call("log", finished.append, step=1, start_time=8)
    assert finished == [{"step": 0, "start_time": 5}]
    again = Program(path, 0)
    again.call("log", finished.append, step=0, start_time=9)
    again.call("log", finished.append, step=1, start_time=9)
    assert (len(finished), again.made) == (1, [])


def test_values_of_another_number_of_ranks_count_as_equal(tmp_path: Path) -> None:
    lost = Program(tmp_path / "calls")
    for value in (0.1, float("nan"), 3e-7):
        lost.call("log", _value=value)
    program = Program(tmp_path / "calls", 0)
    for value in (0.1 + 1e-16, float("nan"), 3.0000001e-7):
        program.call("log", _value=value)
    assert (program.made, program.said) == ([], [])
    program = Program(tmp_path / "calls", 0)
    program.call("log", _value="a text")
    assert len(program.said) == 1


def test_a_program_that_makes_other_calls_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    lost = Program(path)
    for step in range(3):
        lost.call("log", step=step)
    program = Program(path, 0)
    for step in (0, 7, 2):
        program.call("log", step=step)
    assert program.made == ["log", "log"]
    assert len(program.said) == 1
    assert "something else" in program.said[0]
    again = Program(path, 0)
    for step in (0, 7, 2):
        again.call("log", step=step)
    assert (again.made, again.said) == ([], [])


def test_the_end_of_a_run_that_has_failed_is_not_missed(tmp_path: Path) -> None:
    lost = Program(tmp_path / "calls")
    lost.call("update_run_info", status="FAILED")
    program = Program(tmp_path / "calls", 0)
    program.call("log", step=0)
    assert (program.made, program.said) == (["log"], [])
