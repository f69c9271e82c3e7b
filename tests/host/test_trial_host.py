"""A slot of a search that has not enough processes or files left for the ranks of the next trial."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

from lagom.host import trial_host
from lagom.host.trial_host import serve_trials
from lagom.wire.client import Message
from lagom.wire.server import anonymous_file


class Link:
    """A driver with three trials."""

    def __init__(self) -> None:
        trials = [{"type": "trial", "number": number, "folder": ""} for number in range(3)]
        self._messages: list[Message] = [*trials, {"type": "over"}]
        self.ended: list[Message] = []

    def send(self, message: Message, timeout_s: float = 0.0) -> None:
        if message["type"] == "ended":
            self.ended.append(message)

    def receive(self, timeout_s: float) -> Message:
        return self._messages.pop(0)


def test_a_slot_that_cannot_fork_ahead_forks_when_the_trial_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    ran: list[int] = []
    closed: list[int] = []

    class Ranks:
        """Ranks of a trial, which cannot be forked while another trial runs."""

        def __init__(self, *_: Any) -> None:
            tries.append(len(ran))
            if len(closed) < len(ran):
                raise OSError("Cannot allocate memory")
            self.place = types.SimpleNamespace(host_dir=tmp_path, cwd=tmp_path)
            self.outcomes = [anonymous_file("outcome-0")]
            self.watch, self.unread, self.pids = self, list[Message](), [os.getpid()]

        def begin(self, trial: Message) -> bool:
            ran.append(trial["number"])
            return True

        def supervise(self, kept: Any) -> list[Message]:
            assert not kept
            return [{"rank": 0, "ok": True}]

        def close(self) -> None:
            closed.append(ran[-1])

    monkeypatch.setattr(trial_host, "TrialRanks", Ranks)
    monkeypatch.setattr(trial_host, "keep_files", lambda *_: [])
    spec: Any = types.SimpleNamespace(whole_env=False, env={}, plan=types.SimpleNamespace(world_size=1))
    ground: Any = types.SimpleNamespace(host="here", scratch=False)
    link: Any = Link()
    serve_trials(spec, 0, ground, link, "127.0.0.1")
    assert ran == [0, 1, 2]
    assert len(link.ended) == 3
    assert closed == [0, 1, 2]
    assert tries == [0, 1, 1, 2, 2, 3]
