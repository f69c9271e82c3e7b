"""``lagom.timings``: each moment of a run belongs to one part, and the parts' sum is the time since the call."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lagom import experiment, timings
from lagom.config import TorchDistributedConfig
from lagom.timings import Timings


def test_the_parts_add_up_to_the_time_since_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(timings, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = Timings(earlier_s=7.0)
    now[0] = 101.0
    clock.end("prepare")
    now[0] = 110.0
    clock.end_at("slots", 104.0)
    clock.end_at("lost", None)
    clock.end("start", 2.0)
    clock.end("function", 50.0)  # a rank's clock may run ahead of the driver's
    now[0] = 111.0
    clock.end("collect")
    clock.end("frame")
    assert clock.parts() == {
        "earlier": 7.0,
        "prepare": 1.0,
        "slots": 3.0,
        "start": 2.0,
        "function": 4.0,
        "collect": 1.0,
    }
    assert clock.seconds() == 18.0


def test_an_inline_run_has_the_same_clock(tmp_path: Path) -> None:
    def train() -> None:
        time.sleep(0.2)

    config = TorchDistributedConfig(launcher="inline", run_dir=str(tmp_path))
    for each in (config, dataclasses.replace(config, run_dir=None)):
        before = time.monotonic()
        result = experiment.lagom(train, each)
        assert 0.2 <= result.timings["function"] <= result.seconds <= time.monotonic() - before
        assert sum(result.timings.values()) == pytest.approx(result.seconds)
