"""The timeline: what ranks note of their time, and the one trace that is made of it."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from lagom.extensions.observe.report.report import report
from lagom.extensions.observe.timeline.timeline import merge
from lagom.result import Result
from lagom.run_folder import RunFolder
from lagom.watch import spans as kinds
from lagom.watch.run_dir import RunRecords
from lagom.watch.spans import Spans, activity, current, unpack_spans

LATE_S = 0.1


def train(fails: bool = False) -> float:
    """Rank 1 comes late to every backward."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(24, 4), torch.ones(24, 1))
    for number, (x, y) in enumerate(DataLoader(data, batch_size=4)):
        loss = nn.functional.mse_loss(model(x), y)
        if lagom.rank() == 1:
            time.sleep(LATE_S)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fails and number == 3 and lagom.rank() == 1:
            raise RuntimeError("enough")
    with torch.no_grad():
        for x, _ in DataLoader(data, batch_size=8):
            model(x)
    return float(loss.detach())


def run(tmp_path: Path, function: Any = train, **settings: Any) -> Result:
    given: dict[str, Any] = {"world_size": 2, "launcher": "local", "run_dir": tmp_path, "timeline": True, "seed": 0}
    return experiment.lagom(function, TorchDistributedConfig(**given | settings))


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def faults(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the events that break the trace event format, or cannot be drawn."""
    rows: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in found:
        if event["ph"] == "M":
            if event["name"] not in ("process_name", "process_sort_index", "thread_name", "thread_sort_index"):
                yield f"no such metadata: {event}"
        elif event["ph"] != "X" or event["dur"] < 0 or event["ts"] < 0 or not isinstance(event["name"], str):
            yield f"no slice: {event}"
        else:
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for row, slices in rows.items():
        open_: list[float] = []
        for start, end, name in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ and open_[-1] <= start + 0.002:
                open_.pop()
            if open_ and end > open_[-1] + 0.002:
                yield f"{name} in {row} ends after what it is in"
            open_.append(end)


def test_a_run_leaves_one_trace_in_which_slices_nest_and_the_late_rank_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    result = run(tmp_path / "runs", timeline=copy)
    assert result.run_dir is not None
    found = events(result.run_dir / "timeline.json")
    assert list(faults(found)) == []
    assert copy.read_text() == (result.run_dir / "timeline.json").read_text()
    names = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert {name.partition(" (")[0] for name in names} == {"rank 0", "rank 1"}
    for rank in range(2):
        threads = {event["args"]["name"] for event in found if event["name"] == "thread_name" and event["pid"] == rank}
        assert {"steps", "program", "loader", "collectives"} <= threads
        own = [event for event in found if event["pid"] == rank and event["ph"] == "X"]
        count = defaultdict(
            int, {name: sum(event["name"] == name for event in own) for name in {e["name"] for e in own}}
        )
        assert count["backward"] == count["SGD.step"] == count["average"] == 6
        assert count["Sequential"] == 6 + 3
        assert count["wait for data"] == 2 * (6 + 1 + 3 + 1)  # in two rows
        assert all(event["args"]["bytes"] > 0 for event in own if event["name"] == "average")
    waits = [event for event in found if event["name"] == "waits for rank 1" and event["pid"] == 0]
    # A busy machine may hold up the other rank as well, now and then.
    assert sum(event["dur"] > 0.5e6 * LATE_S for event in waits) >= 3
    told = json.loads((result.run_dir / "timeline-summary.json").read_text())["ranks"]
    assert told["1"]["held_up_s"] > 1.5 * LATE_S
    assert told["0"]["shares"]["waiting"] > 0
    assert told["0"]["steps"] == told["1"]["steps"] == 9
    for one in told.values():
        assert sum(one["shares"].values()) == pytest.approx(1, abs=0.01)
    page = result.report().read_text()
    assert "held up the others" in page
    assert ">backward</text>" in page


@pytest.mark.soak  # tests/integration/test_out_of_reach.py compares weights by default
def test_numbers_are_the_same_with_and_without(tmp_path: Path) -> None:
    def weights() -> list[float]:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.rand(26, 4), torch.rand(26, 1))
        for x, y in DataLoader(data, batch_size=4, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return [number for parameter in model.parameters() for number in parameter.flatten().tolist()]

    found = [run(tmp_path, weights, timeline=timeline).per_rank for timeline in (False, True)]
    assert found[0] == found[1]


def test_a_run_that_fails_leaves_its_timeline_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="enough"):
        run(tmp_path, hparams={"fails": True})
    (folder,) = tmp_path.iterdir()
    # The other one is ended as soon as that is known.
    backwards = [event["pid"] for event in events(folder / "timeline.json") if event["name"] == "backward"]
    assert backwards.count(1) == 4
    alone = events(merge(folder, tmp_path / "alone.json", ranks=[1]))
    assert {event["pid"] for event in alone} == {1}
    assert sum(event["name"] == "backward" for event in alone) == 4


@pytest.mark.soak  # above, a rank fails by default
def test_of_a_rank_that_is_killed_there_is_what_it_had_told(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        model(torch.ones(2, 4)).sum().backward()
        if lagom.rank() == 1:
            time.sleep(1.0)  # of heartbeats
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run(tmp_path, program, hb_interval=0.05, max_failures=0)
    (folder,) = tmp_path.iterdir()
    backwards = [event["pid"] for event in events(folder / "timeline.json") if event["name"] == "backward"]
    assert set(backwards) == {0, 1}
    assert list(faults(events(folder / "timeline.json"))) == []


@pytest.mark.soak
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_program_that_is_distributed_already_shows_its_exchanges(tmp_path: Path, backend: str | None) -> None:
    def program() -> None:
        dist.init_process_group(backend)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(torch.ones(250))

    result = run(tmp_path, program)
    assert result.run_dir is not None
    found = events(result.run_dir / "timeline.json")
    assert list(faults(found)) == []
    sizes = [event["args"]["bytes"] for event in found if event["name"] == "all_reduce" and event["pid"] == 1]
    assert sizes.count(1000) == 5
    if backend is None:  # gloo's are C++, within the backward
        assert len(sizes) > 5
    assert sum(event["name"] == "backward" for event in found) == 10


def test_one_rank_inline_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = nn.Module.__call__, DataLoader.__iter__, torch.autograd._engine_run_backward, dist.all_reduce
    result = run(tmp_path, launcher="inline", world_size=1)
    assert (nn.Module.__call__, DataLoader.__iter__, torch.autograd._engine_run_backward, dist.all_reduce) == before
    assert result.run_dir is not None
    assert list(faults(events(result.run_dir / "timeline.json"))) == []


def test_without_a_folder_there_is_no_timeline() -> None:
    with pytest.raises(ValueError, match="timeline is kept in the run's folder, but run_dir is None"):
        TorchDistributedConfig(timeline=True, run_dir=None)
    with pytest.raises(ValueError, match="timeline is 3; want True, False or the path"):
        TorchDistributedConfig(timeline=3)  # type: ignore[arg-type]


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self, now: int = 1000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def noted(spans: Spans) -> list[list[Any]]:
    return [span for block in spans.blocks() for span in json.loads(unpack_spans(block.data))["spans"]]


def test_a_long_run_keeps_its_first_steps_and_samples_of_later_ones() -> None:
    clock = Clock()
    spans = Spans(0, clock)
    for _ in range(5000):
        clock.now += 10
        spans.batch(clock.now)
    kept = [span[-1] for span in noted(spans) if span[0] == kinds.STEP]
    later = [range(start, start + 20) for start in (200, 400, 800, 1600, 3200)]
    assert kept == [*range(1, 101), *(number for part in later for number in part)]
    spans = Spans(0, clock)
    for _ in range(10_000):
        spans.backward(clock.now)
        for _ in range(300):
            spans.add(kinds.COPY, "load", clock.now)
    assert 20_000 < len(noted(spans)) <= 30_000
    spans.add(kinds.COPY, "load", clock.now)
    assert noted(spans) == []


def test_time_is_counted_once_however_deep(tmp_path: Path) -> None:
    clock = Clock(1)
    spans = Spans(0, clock)

    def passes(time: int) -> None:
        clock.now += time

    timed = spans.timed(kinds.COLLECTIVE, "exchange", passes)

    def outer() -> None:
        passes(100)
        timed(50)
        timed(50)

    def fails() -> None:
        passes(40)
        raise ZeroDivisionError

    for _ in range(3):
        spans.backward(clock.now)
        spans.timed(kinds.BACKWARD, "backward", outer)()
        with pytest.raises(ZeroDivisionError):
            spans.timed(kinds.FORWARD, "forward", fails)()
        passes(60)
    spans.finish()
    records = RunRecords(tmp_path, {"name": "x"})
    records.close()
    for block in spans.blocks():
        records.timed(block)
    told = json.loads(merge(tmp_path).read_text())["otherData"]["summary"]["ranks"]["0"]
    assert told["shares"]["moving"] == told["shares"]["backward"] == pytest.approx(1 / 3, abs=1e-3)
    assert told["shares"]["forward"] == pytest.approx(40 / 300, abs=1e-3)
    assert told["shares"]["rest"] == pytest.approx(60 / 300, abs=1e-3)
    assert (told["steps_kept"], told["seconds_kept"]) == (2, 600e-9)


def test_an_activity_has_a_row_of_its_own(tmp_path: Path) -> None:
    with activity("weight", "QUEUE"):  # no timeline: nothing happens
        pass
    spans = Spans(0)
    with current(spans), activity("weight", "ALLREDUCE", 64):
        pass
    records = RunRecords(tmp_path, {"name": "x"})
    records.close()
    for block in spans.blocks():
        records.timed(block)
    found = events(merge(tmp_path))
    row = next(event["tid"] for event in found if event["ph"] == "M" and event["args"].get("name") == "weight")
    assert [event["name"] for event in found if event["ph"] == "X" and event["tid"] == row] == ["ALLREDUCE"]


@pytest.mark.parametrize("name", ["timeline.json", "timeline-summary.json"])
@pytest.mark.parametrize("has_part", [True, False], ids=["cut off", "missing"])
def test_a_page_leaves_out_what_was_not_written_whole(name: str, has_part: bool, tmp_path: Path) -> None:
    spans = Spans(0)
    for _ in range(3):
        spans.backward(spans.clock())
    spans.finish()
    records = RunRecords(tmp_path, {"name": "x"})
    records.close()
    for block in spans.blocks():
        records.timed(block)
    merge(tmp_path)
    assert 'aria-label="Timeline"' in report(RunFolder.open(tmp_path))
    text = (tmp_path / name).read_text()
    (tmp_path / name).unlink()
    if has_part:
        (tmp_path / name).write_text(text[: len(text) // 2])
    page = report(RunFolder.open(tmp_path))
    assert 'aria-label="Timeline"' not in page
    assert ("held up the others" in page) == (name == "timeline.json")


def test_clocks_of_several_hosts_are_put_on_one(tmp_path: Path) -> None:
    ahead = {0: 0, 1: 7_000_000_000, 2: -3_000_000}
    draws = random.Random(1)
    records = RunRecords(tmp_path, {"name": "x"})
    records.close()
    clocks = {rank: Clock(10**12 + ahead[rank]) for rank in ahead}
    ranks = {rank: Spans(rank, clock, f"host {rank}") for rank, clock in clocks.items()}
    for number in range(50):
        came = {rank: number * 10_000_000 + draws.randrange(3_000_000) for rank in ahead}
        for rank, spans in ranks.items():
            start = 10**12 + came[rank] + ahead[rank]
            clocks[rank].now = 10**12 + max(came.values()) + ahead[rank] + draws.randrange(20_000, 60_000)
            spans.add(kinds.COLLECTIVE, "exchange", start, 32, "ranks", number)
    for rank, spans in ranks.items():
        for block in spans.blocks():
            records.timed(dataclasses.replace(block, rank=rank))
    told = json.loads(merge(tmp_path).read_text())["otherData"]["clocks"]
    for one in told:
        assert abs(one["ahead_us"] * 1000 - ahead[one["rank"]]) <= one["within_us"] * 1000
        assert one["within_us"] < 60
    assert list(faults(events(tmp_path / "timeline.json"))) == []


def test_a_damaged_block_is_an_error() -> None:
    spans = Spans(0)
    spans.add(kinds.COPY, "load", 0)
    good = next(iter(spans.blocks())).data
    assert json.loads(unpack_spans(good))["rank"] == 0
    for bad in ("", "not base64", good[: len(good) // 2 // 4 * 4], "A" * 400):
        with pytest.raises(ValueError, match=r"timeline|base64|Incorrect|padding"):
            unpack_spans(bad)
    with pytest.raises(ValueError, match="too long"):
        unpack_spans(good, most=10)
