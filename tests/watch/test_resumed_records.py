"""The records of a run with which another process goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lagom.digests import parse_record
from lagom.watch.run_dir import RunRecords
from tests.watch.heartbeats import report_of
from tests.wire.joins import join

FIRST = {"name": "a run", "description": "of a test", "config": {"module": "Net()", "hparams": {"lr": 0.5}}}
LATER = {"name": "a run", "description": "", "config": {"module": None, "hparams": {}}}


def loaded(path: Path) -> Any:
    """The record in a file, without its digest."""
    return parse_record(path.read_text())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that ``time.monotonic`` tells, in a list."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def process(folder: Path, clock: list[float], begin: float, ends: bool) -> None:
    """Write the records of a process of 10 s, which reports in its 4th and 8th second."""
    clock[0] = begin
    records = RunRecords(folder, FIRST)
    for after in (4.0, 8.0):
        clock[0] = begin + after
        records.progressed(report_of(samples=1))
    clock[0] = begin + 10.0
    if ends:
        records.ended({"outcome": "raised"})
    records.close()


@pytest.mark.parametrize(("ends", "lasts"), [(True, 10.0), (False, 8.0)])
def test_time_goes_on_in_a_resumed_run(ends: bool, lasts: float, tmp_path: Path, clock: list[float]) -> None:
    process(tmp_path, clock, 1000.0, ends)
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write("" if ends else '{"seco\n')  # its driver was killed
    process(tmp_path, clock, 50.0, True)
    (tmp_path / "progress.jsonl").write_text((tmp_path / "progress.jsonl").read_text().replace('{"seco\n', ""))
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert seconds == [4.0, 8.0, lasts + 4.0, lasts + 8.0]
    assert loaded(tmp_path / "result.json")["seconds"] == lasts + 10.0


def test_the_seconds_until_ranks_joined_are_those_of_the_first_attempt(tmp_path: Path, clock: list[float]) -> None:
    found = []
    for _ in range(2):  # the second process goes on with the run
        records = RunRecords(tmp_path, FIRST)
        for attempt in range(2):
            if attempt:
                records.begin_again(2)
            for rank in range(2):
                clock[0] += 1.0
                records.joined(join(rank, host="a", ip="::1"))
            found.append(loaded(tmp_path / "run.json")["seconds_to_join"])
        records.close()
    assert found == [2.0] * 4


def test_samples_of_an_earlier_attempt_are_no_speed(tmp_path: Path, clock: list[float]) -> None:
    def report(samples: int, rate: float) -> None:
        clock[0] += 1.0
        for rank in range(2):
            records.progressed(report_of(rank, samples=samples, rate=rate))

    records = RunRecords(tmp_path, FIRST)
    for attempt in range(3):
        if attempt == 1:
            records.begin_again(2)
        elif attempt == 2:
            records.close()
            records = RunRecords(tmp_path, LATER)
        report(0, 0.0)
        report(1000, 1000.0 if attempt else 7.0)  # all that the attempts before have done, within a second
        report(1007, 7.0)
    records.close()
    events = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    rates = [event["rate"] for event in events if event["rank"] == 1]
    assert rates == [0.0, 7.0, 7.0, None, None, 7.0, None, None, 7.0]
