"""``Departure``: which news and which snapshots end an attempt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lagom.driver.departure import Departure
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.restart.losses import Loss
from lagom.wire.server import DriverServer
from lagom.wire.snapshot_messages import SnapshotKept, SnapshotWanted
from tests.restart.added_snapshot import add_snapshot

GOING = Loss(rank=1, host="there", cause="Spark decommissions executor 1 on there, which holds rank 1", is_planned=True)
HEARD = Loss(rank=0, host="here", cause="rank 0 received SIGTERM")


class Attempt:
    """An attempt whose ranks have begun, with what its departure has done."""

    def __init__(self, folder: SnapshotFolder | None) -> None:
        self.sent: list[Any] = []
        self.ends: list[Loss] = []
        self.said: list[str] = []
        self.late: list[Any] = []
        """Calls that the channel is to make later."""
        self.history = RunHistory(3, snapshots=folder)
        self.history.ranks_began()
        self._folder = folder
        channel = SimpleNamespace(broadcast=self.sent.append, call_later=self._call_later)
        self.departure = Departure(cast(DriverServer, channel), self.history, self.ends.append, self.said.append)

    def _call_later(self, delay_s: float, function: Any) -> None:
        if delay_s > 0:
            self.late.append(function)
        else:
            function()

    def keep(self, number: int, *, is_wanted: bool = False) -> None:
        """Take a snapshot, and put it in its place."""
        assert self._folder is not None
        add_snapshot(self._folder, number)
        self.departure.expect(SnapshotKept(number=number, at=1.0, place=[1, number], bytes=1, is_wanted=is_wanted))
        self.departure.notice_snapshot(number)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    folder = SnapshotFolder(str(tmp_path / "snapshots"))
    folder.make()
    return Attempt(folder)


def test_the_snapshot_that_is_wanted_ends_the_attempt_and_one_that_was_under_way_does_not(attempt: Attempt) -> None:
    attempt.departure.announce(GOING)
    assert [type(message) for message in attempt.sent] == [SnapshotWanted]
    attempt.keep(1)
    assert attempt.ends == []
    attempt.keep(2, is_wanted=True)
    assert attempt.ends == [GOING]
    assert attempt.said == []


def test_ranks_that_begin_after_the_notice_are_told(attempt: Attempt) -> None:
    attempt.departure.ranks_began()
    assert attempt.sent == []
    attempt.departure.announce(GOING)
    attempt.departure.ranks_began()
    assert [type(message) for message in attempt.sent] == [SnapshotWanted, SnapshotWanted]


def test_an_attempt_that_hears_of_another_executor_wants_no_second_snapshot(attempt: Attempt) -> None:
    attempt.departure.announce(GOING)
    attempt.departure.announce(GOING)
    assert len(attempt.sent) == 1


def test_the_attempt_goes_on_until_there_is_room_elsewhere(attempt: Attempt) -> None:
    attempt.history.has_room = lambda: False
    attempt.departure.announce(GOING)
    attempt.keep(1, is_wanted=True)
    attempt.keep(2)
    assert attempt.ends == []
    (said,) = attempt.said
    assert "too few other executors are there" in said
    attempt.history.has_room = lambda: True
    attempt.keep(3)
    assert attempt.ends == [GOING]


def test_without_snapshots_the_attempt_goes_on_and_the_user_is_told_the_setting() -> None:
    attempt = Attempt(None)
    attempt.departure.announce(GOING)
    assert (attempt.sent, attempt.ends) == ([], [])
    (said,) = attempt.said
    assert "keeps no snapshot (snapshot_every_s)" in said
    attempt.departure.announce(HEARD, 7.0)
    assert attempt.ends == [HEARD]


def test_sigterm_to_a_rank_does_not_wait_for_room_nor_for_ever_for_a_snapshot(attempt: Attempt) -> None:
    attempt.history.has_room = lambda: False
    attempt.departure.announce(HEARD, 7.0)
    (end,) = attempt.late
    end()
    assert attempt.ends == [HEARD]
    attempt.keep(1, is_wanted=True)
    assert attempt.ends == [HEARD, HEARD]  # the owner ends the attempt once


def test_sigterm_after_a_decommission_ends_the_attempt_without_room_elsewhere(
    attempt: Attempt,
) -> None:
    attempt.history.has_room = lambda: False
    attempt.departure.announce(GOING)
    attempt.keep(1, is_wanted=True)
    attempt.departure.announce(HEARD, 7.0)
    attempt.departure.announce(HEARD, 7.0)
    attempt.departure.announce(GOING)
    assert [len(attempt.sent), len(attempt.late), attempt.ends] == [2, 1, []]
    attempt.keep(2, is_wanted=True)
    assert attempt.ends == [HEARD]


def test_ranks_that_begin_after_sigterm_to_the_driver_are_told(attempt: Attempt) -> None:
    attempt.departure.release()
    attempt.departure.leave(has_ranks=True)
    attempt.departure.ranks_began()
    assert [type(message) for message in attempt.sent] == [SnapshotWanted, SnapshotWanted]


def test_what_ranks_hear_after_sigterm_to_the_driver_changes_nothing(attempt: Attempt) -> None:
    attempt.departure.release()
    attempt.departure.leave(has_ranks=True)
    attempt.departure.announce(HEARD, 7.0)
    attempt.keep(1, is_wanted=True)
    assert (len(attempt.sent), attempt.ends) == (1, [])
