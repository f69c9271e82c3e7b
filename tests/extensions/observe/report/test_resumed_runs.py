"""What the report and the timeline say of a run that another process has continued."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from lagom.extensions.observe.report.compare_runs import compare_runs
from lagom.extensions.observe.report.report import report
from lagom.extensions.observe.timeline.timeline import merge
from lagom.run_folder import RunFolder
from lagom.watch import spans as kinds
from lagom.watch.run_dir import RunRecords
from lagom.watch.spans import Spans
from tests.watch.test_resumed_records import FIRST, LATER, loaded

LOSS = {"time": "2026-01-01T00:00:00+00:00", "rank": 0, "host": "a", "cause": "lost", "resumed_from": None}


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
