"""``search.on_host.trial_host``: a slot of a search goes on, whatever happens to the ranks of a trial."""

from __future__ import annotations

import base64
import os
import types
from pathlib import Path
from typing import Any

import pytest

from lagom.extensions.search.on_host import trial_host
from lagom.extensions.search.on_host.trial_host import serve_trials
from lagom.extensions.search.on_rank.messages import OutcomePart, RunTrial, SearchOver, TrialEnded
from lagom.wire.framing import anonymous_file, body_of
from lagom.wire.messages import Message, RankReport


class Link:
    """A driver with three trials; its messages fit into frames."""

    def __init__(self) -> None:
        facts: dict[str, Any] = {"change": "", "metric": "loss", "threads": 1, "gpus": [], "folder": "", "env": {}}
        trials = [RunTrial(number=number, **facts) for number in range(3)]
        self._messages: list[Message] = [*trials, SearchOver()]
        self.ended: list[TrialEnded] = []
        self.outcomes: list[bytes] = []

    def send(self, message: Message, timeout_s: float = 0.0) -> None:
        assert body_of(message)
        if isinstance(message, TrialEnded):
            self.ended.append(message)
        if isinstance(message, OutcomePart) and message.name == "outcome":
            self.outcomes.append(base64.b64decode(message.data))

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

        def begin(self, trial: RunTrial) -> bool:
            ran.append(trial.number)
            return True

        def supervise(self, kept: Any) -> list[RankReport]:
            assert not kept
            return [RankReport(rank=0, ok=True)]

        def close(self) -> None:
            closed.append(ran[-1])

    link = served(Ranks, 1, monkeypatch)
    assert ran == [0, 1, 2]
    assert len(link.ended) == 3
    assert closed == [0, 1, 2]
    assert tries == [0, 1, 1, 2, 2, 3]


def test_of_ranks_that_all_fail_the_cause_is_sent_and_all_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails only because another one has failed, and all have long messages."""
    texts: Any = {"message": "x" * 60_000, "traceback": "x" * 60_000}
    failed = [RankReport(rank=rank, ok=False, consequence=rank == 0, **texts) for rank in range(9)]

    class Ranks:
        """Ranks of a trial, all of which fail."""

        def __init__(self, *_: Any) -> None:
            self.place = types.SimpleNamespace(host_dir=tmp_path, cwd=tmp_path)
            self.outcomes = [anonymous_file(f"outcome-{rank}") for rank in range(9)]
            for rank, fd in enumerate(self.outcomes):
                os.write(fd, b"error of rank %d" % rank)
            self.watch, self.unread, self.pids = self, list[Message](), list[int]()

        def begin(self, trial: RunTrial) -> bool:
            return True

        def supervise(self, kept: Any) -> list[RankReport]:
            return failed

        def close(self) -> None:
            for fd in self.outcomes:
                os.close(fd)

    link = served(Ranks, 9, monkeypatch)
    assert link.outcomes == [b"error of rank 1"] * 3
    assert [[report.rank for report in message.reports] for message in link.ended] == [list(range(9))] * 3


def served(ranks: type, world_size: int, monkeypatch: pytest.MonkeyPatch) -> Link:
    """The driver's end after a slot has run all trials with such ranks."""
    monkeypatch.setattr(trial_host, "TrialRanks", ranks)
    monkeypatch.setattr(trial_host, "keep_files", lambda *_: [])
    spec: Any = types.SimpleNamespace(whole_env=False, env={}, plan=types.SimpleNamespace(world_size=world_size))
    workspace: Any = types.SimpleNamespace(host="here", scratch=False)
    link: Any = Link()
    serve_trials(spec, 0, workspace, link, "127.0.0.1")
    return link  # type: ignore[no-any-return]
