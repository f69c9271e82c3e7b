"""``lagom.on_rank.heartbeat``: what a rank reports of its progress."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.on_rank import heartbeat as module
from lagom.on_rank.heartbeat import Heartbeat
from lagom.plan import plan
from lagom.wire.messages import Message, ProgressReport, RankReport
from tests.ranks import session_alone


class Control:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    offer = send


def test_a_last_report_soon_after_another_has_the_means_of_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, the end of a program after its training would look as if the training had become slow."""
    clock, samples = SimpleNamespace(at=10.0), iter((0, 80, 80, 80))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.at))

    def progress() -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the reports of the thread end here")
        return {"epoch": 1, "step": 5, "steps": 5, "samples": next(samples), "loss": None, "ticks": 0}

    known: dict[str, Any] = {
        "rank": 0,
        "world_size": 2,
        "local_world_size": 2,
        "has_joined": False,
        "spans": None,
        "device": torch.device("cpu"),
    }
    progressed = SimpleNamespace(report=progress, data_s=0.0, ticks=0, pictures=deque[str]())
    session: Any = SimpleNamespace(progress=progressed, wait_times=lambda: [0, 0], **known)
    config = TorchDistributedConfig(launcher="local", world_size=2, hb_interval=0.1)
    control: Any = Control()
    heart = Heartbeat(control, plan(config, Cluster(launcher="local", slots=2)), None)
    heart.beat_for(session)
    for seconds in (0.2, 0.04, 0.01, 0.2):
        clock.at += seconds
        heart.send_outcome(RankReport(rank=0, ok=True))
    rates = [message.rate for message in control.sent if isinstance(message, ProgressReport)]
    assert rates == [0.0, 333.3, 320.0, 0.0]  # 80 in 0.24 s, and in 0.25 s
    _join_heartbeats()


def test_values_that_an_extension_sets_travel_with_the_progress(tmp_path: Path) -> None:
    class Ended(Control):
        def offer(self, message: Message) -> None:
            raise OSError("the reports of the thread end here")

    session = session_alone(tmp_path)
    config = TorchDistributedConfig(launcher="local", world_size=1, hb_interval=0.1)
    control: Any = Ended()
    heart = Heartbeat(control, plan(config, Cluster(launcher="local", slots=1)), None)
    heart.beat_for(session)
    session.progress.progress_values["NaNs"] = 3
    heart.send_outcome(RankReport(rank=0, ok=True))
    session.progress.progress_values["NaNs"] = 4
    assert [message.values for message in control.sent if isinstance(message, ProgressReport)] == [{"NaNs": 3}]
    _join_heartbeats()


def _join_heartbeats() -> None:
    for thread in threading.enumerate():
        if thread.name == "lagom-heart":
            thread.join(60)
