"""Display of a running search: the table in a notebook, and the lines of a terminal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import pytest

from lagom.extensions.search import search_progress
from lagom.extensions.search.search_progress import SearchProgress
from lagom.extensions.search.trial_source import State, TrialOutcome, TrialSpec


class Display:
    """A notebook's display that keeps what it shows."""

    shown: str

    def display(self, bundle: dict[str, str], **_: Any) -> Display:
        """Show the first state."""
        self.update(bundle)
        return self

    def update(self, bundle: dict[str, str], **_: Any) -> None:
        """Show the next state."""
        self.shown = bundle["text/html"]

    def rows(self) -> list[list[str]]:
        """The texts of the table's cells, by row; empty without a table."""
        page = ElementTree.fromstring(self.shown)
        return [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]

    def lines(self) -> list[str]:
        """The texts above and below the table."""
        return ["".join(one.itertext()) for one in ElementTree.fromstring(self.shown).findall("div")]


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    """The display of this process, as if it were a notebook's kernel."""
    found = Display()
    monkeypatch.setattr(search_progress, "notebook", lambda: found)
    monkeypatch.setattr("lagom.watch.status_line.StatusLine.is_due", lambda _: True)
    return found


def join(progress: SearchProgress, *hosts: str) -> None:
    """Have slots on ``hosts`` join."""
    for slot, host in enumerate(hosts):
        progress.joined(slot, host)


def begin(progress: SearchProgress, slot: int, number: int, **params: Any) -> None:
    """Have a slot begin a trial."""
    progress.began(slot, number, params)


def end(
    progress: SearchProgress, slot: int, number: int, state: State, value: float | None = None, **params: Any
) -> None:
    """Have the trial of a slot end."""
    spec = TrialSpec(number=number, params=params, change=lambda call: call)
    error = "ValueError: a <bad>\nvalue" if state == "failed" else ""
    progress.ended(spec, TrialOutcome(state=state, value=value, error=error))
    progress.idle(slot)


def test_the_table_follows_a_search_from_the_first_slot_to_the_end(
    display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = SearchProgress("train <it>", "this machine", 2, "min", None, 4)
    join(progress, "box.example.com")
    assert display.lines()[:1] == ["train <it>: 2 trials at a time on this machine; the smallest metric is best"]
    assert "1 of 2 slots are ready" in display.lines()
    assert display.rows()[1:] == [["0", "idle", "", "", ""]]
    progress.joined(1, "box.example.com")
    assert capsys.readouterr().err == ""  # a notebook would show it in red
    begin(progress, 0, 0, lr=0.25, act="relu")
    progress.reported(0, 7)
    begin(progress, 1, 1, lr=0.5)
    progress.reported(1, 3, 0.125)
    assert display.rows() == [
        ["slot", "trial", "step", "value", "seconds", "lr", "act"],
        ["0", "0", "7", "", "0", "0.25", "relu"],
        ["1", "1", "3", "0.125", "0", "0.5", ""],
    ]
    assert "0 of 4 trials done, 2 running" in display.lines()[2]
    end(progress, 0, 0, "failed")
    end(progress, 1, 1, "complete", 0.5, lr=0.5)
    begin(progress, 0, 2, lr=0.75)
    end(progress, 0, 2, "pruned", 9.0)
    begin(progress, 0, 3, lr=1.0)
    end(progress, 0, 3, "complete", 0.25, lr=1.0)
    assert "trial 0 failed: ValueError: a <bad> value" in display.lines()
    assert [row[:2] for row in display.rows()[1:]] == [["0", "idle"], ["1", "idle"]]
    progress.close()
    assert display.rows() == []
    assert "4 of 4 trials done, 1 pruned, 1 failed, best 0.25 (trial 3), slots" in display.lines()[2]
    assert "best with lr=1" in display.lines()
    assert "width:100%" in display.shown


def test_slots_are_as_busy_as_in_the_reports_chart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trials of test_search_report.py: 83 % of the time from the first start to the last end."""
    now = [50.0]
    monkeypatch.setattr(search_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = SearchProgress("train", "this machine", 3, "min", None)
    join(progress, "box", "box", "box")  # the third slot never has a trial
    now[0] = 100.0
    for first in (0, 2):
        for slot in (0, 1):
            begin(progress, slot, first + slot)
        now[0] += 2.0
        for slot in (0, 1):
            end(progress, slot, first + slot, "complete", 1.0)
    begin(progress, 0, 4)
    now[0] += 2.0
    end(progress, 0, 4, "complete", 1.0)
    now[0] += 30.0
    progress.close()
    assert "slots 83% busy" in capsys.readouterr().err


def test_of_many_slots_some_are_shown_and_hosts_are_named(display: Display) -> None:
    progress = SearchProgress("train", "Spark", 32, "max", None)
    join(progress, *(f"worker-{slot // 8}.cluster" for slot in range(32)))
    for slot in range(32):
        begin(progress, slot, slot, **{f"name{number}": "x" * 40 for number in range(9)})
    rows = display.rows()
    assert rows[0] == ["slot", "host", "trial", "step", "value", "seconds", "hyperparameters"]
    assert rows[9][1] == "worker-1"
    assert rows[1][6].startswith("name0=xxx")
    assert len(rows[1][6]) == 100
    assert len(rows) == 17
    assert display.lines()[-1] == "and 16 more slots"
    assert "0 trials done, 32 running" in display.lines()[1]


def test_a_line_of_a_trial_is_shown_whole_and_with_its_own_trial(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SearchProgress("train", "this machine", 1, "min", None)
    progress.shows_output = True
    join(progress, "box")
    for number in range(2):
        begin(progress, 0, number)
        for data in (b"epoch 1\nf\xc3", b"\xbcr epoch 2"):  # a chunk ends within a character, the last line never
            progress.wrote(0, data)
        progress.idle(0)
    shown = [f"trial {number}: {line}" for number in range(2) for line in ("epoch 1", "f\u00fcr epoch 2")]
    assert capsys.readouterr().out.splitlines() == shown


def test_the_first_failure_of_each_kind_is_a_line_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SearchProgress("train", "this machine", 1, "min", None)
    join(progress, "box")
    for number in range(3):
        begin(progress, 0, number)
        end(progress, 0, number, "failed")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "lagom: train: 1 trial at a time on this machine; the smallest metric is best",
        "lagom: train: trial 0 failed: ValueError: a <bad> value",
    ]
    assert lines[2].startswith("lagom: train: 3 trials done, 3 failed, slots ")
    assert len(lines) == 3
