"""The records of a run with which another process goes on."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lagom.digests import parse_record
from lagom.extensions.observe.report.compare_runs import compare_runs
from lagom.extensions.observe.report.report import report
from lagom.extensions.observe.timeline.timeline import merge
from lagom.run_folder import RunFolder
from lagom.watch import spans as kinds
from lagom.watch.run_dir import RunRecords
from lagom.watch.spans import Spans
from tests.watch.heartbeats import report_of
from tests.wire.joins import join

FIRST = {"name": "a run", "description": "of a test", "config": {"module": "Net()", "hparams": {"lr": 0.5}}}
LATER = {"name": "a run", "description": "", "config": {"module": None, "hparams": {}}}
LOSS = {"time": "2026-01-01T00:00:00+00:00", "rank": 0, "host": "a", "cause": "lost", "resumed_from": None}


def loaded(path: Path) -> Any:
    """The record in a file, without its digest."""
    return parse_record(path.read_text())


def test_a_resumed_run_keeps_the_settings_of_its_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "whole", tmp_path / "resumed"]
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for folder in folders:
        folder.mkdir()
        records = RunRecords(folder, FIRST | {"source": __file__, "world_size": 2})
        records.lost([LOSS | {"seconds_lost": 1.0}])
        records.ended({"outcome": "returned", "value": 1.0})
        records.close()
    first = loaded(folders[1] / "run.json")
    assert first.pop("seconds") == loaded(folders[1] / "result.json")["seconds"]
    monkeypatch.setattr(sys, "argv", ["lagom", "resume"])
    for place in ("batch 3 of epoch 1", "batch 5 of epoch 2"):
        records = RunRecords(folders[1], LATER | {"source": None, "world_size": 3})
        records.goes_on(place)
        records.lost([])
        records.ended({"outcome": "returned", "value": 1.0})
        records.close()
    facts = loaded(folders[1] / "run.json")
    resumed, _ = facts.pop("resumed"), facts.pop("seconds")
    assert facts == first | {"world_size": 3}
    assert [one["from"] for one in resumed] == ["batch 3 of epoch 1", "batch 5 of epoch 2"]
    assert {one["driver"]["argv"][1] for one in resumed} == {"resume"}
    rows = [line.split("  ")[0] for line in compare_runs(*map(RunFolder.open, folders)).splitlines()[1:]]
    assert [row for row in rows if row != "seconds"] == ["world_size", "result"]
    assert ", from batch 5 of epoch 2" in report(RunFolder.open(folders[1]))


def test_the_trace_of_a_resumed_run_is_that_of_its_last_process(tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second", "third")):  # all but the last process are killed
        records = RunRecords(tmp_path, FIRST)
        for rank in range(3 - number):
            spans = Spans(rank, clock_of=f"the clock of the {name} process")
            spans.add(kinds.COPY, name, spans.clock())
            for block in spans.blocks():
                records.timed(dataclasses.replace(block, rank=rank))
        records.close()
    trace = loaded(merge(tmp_path))
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"].count("third") == 2
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"} == {"third"}
    assert trace["otherData"]["ranks"] == 1
    kept = [len(list((tmp_path / f"timelines-lost-{number}").iterdir())) for number in (1, 2)]
    assert kept == [3, 2]


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
