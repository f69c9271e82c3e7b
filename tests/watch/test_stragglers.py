"""``lagom.watch.stragglers``: who holds up the other ranks."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Collectives
from lagom.on_rank.resource_usage import ResourceUsage
from lagom.watch.stragglers import Waits, held_up, straggler


def says(waits: float, **waits_for: float) -> Waits:
    return Waits(waits, {name.removeprefix("rank_"): share for name, share in waits_for.items()})


def test_what_the_others_wait_for_a_rank_is_their_mean() -> None:
    ranks = {0: says(0.5, rank_2=0.5), 1: says(0.3, rank_2=0.2, rank_0=0.1), 2: says(0.02, rank_0=0.02)}
    found = held_up(ranks)
    assert found == pytest.approx({0: 0.06, 1: 0.0, 2: 0.35})
    late = straggler(ranks)
    assert late is not None
    assert late[0] == 2


def test_ranks_that_wait_for_each_other_alike_are_not_named() -> None:
    assert straggler({0: says(0.2, rank_1=0.2), 1: says(0.15, rank_0=0.15)}) is None
    assert straggler({0: says(0.05, rank_1=0.05), 1: says(0.0)}) is None
    assert straggler({0: says(0.0)}) is None
    assert straggler({}) is None


@pytest.mark.parametrize("collectives", ["auto", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_rank_that_comes_late_is_named(tmp_path: Path, collectives: Collectives) -> None:
    def train() -> None:
        model = nn.Linear(4, 1)
        for _ in range(6):
            if lagom.rank() == 1:
                time.sleep(0.25)
            model(torch.ones(8, 4)).sum().backward()

    config = TorchDistributedConfig(world_size=3, launcher="local", run_dir=tmp_path, collectives=collectives)
    result = experiment.lagom(train, config)
    assert result.run_dir is not None
    waits = {0: 0.0, 1: 0.0, 2: 0.0}
    for event in map(json.loads, (result.run_dir / "progress.jsonl").read_text().splitlines()):
        for rank, share in event["waits_for"].items():
            waits[int(rank)] += share
    assert max(waits, key=waits.__getitem__) == 1


def test_processors_and_memory_are_told(tmp_path: Path) -> None:
    def busy() -> None:
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
        time.sleep(0.3)

    config = TorchDistributedConfig(
        world_size=1, launcher="local", run_dir=tmp_path, hb_interval=100.0, stall_timeout_s=math.inf
    )
    result = experiment.lagom(busy, config)
    assert result.run_dir is not None
    (event,) = [json.loads(line) for line in (result.run_dir / "progress.jsonl").read_text().splitlines()]
    assert event["cpu"] * event["seconds"] > 0.4  # of which the program kept a processor busy for 0.5
    assert event["rss"] == event["memory"] > 10**7
    assert event["gpu"] is None


def test_the_use_of_a_gpu_is_told_where_nvidias_library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 << 20)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    usage = ResourceUsage("cuda")
    assert (usage.now()["gpu"], usage.now()["memory"]) == (0.87, 5 << 20)

    def missing(device: object) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert usage.now()["gpu"] is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 1 / 0)
    assert usage.now()["gpu"] is None  # it is not asked again
