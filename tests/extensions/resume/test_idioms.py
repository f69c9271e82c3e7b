"""Programs go on exactly from each of their batches; those that cannot are told why."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lagom.errors import SnapshotError
from lagom.extensions.resume.frame_position import NoSnapshotError
from lagom.extensions.resume.program_state import ProgramInProgress
from lagom.extensions.resume.rank_snapshots import follow_loaders
from lagom.on_rank.process_settings import library_settings, set_process_settings
from lagom.program.signature import Call
from lagom.program.sources import source_files
from lagom.run_state.random_streams import seed_everything
from lagom.session.events import Events
from lagom.session.session import Session
from tests.extensions.resume import idioms, rare_idioms, refused_idioms, worker_idioms
from tests.ranks import run_ranks

EXACT = (*idioms.EXACT, *rare_idioms.EXACT)
WITH_WORKERS = (*worker_idioms.EXACT, *worker_idioms.RARELY_RUN)
REFUSED = idioms.REFUSED | refused_idioms.REFUSED | worker_idioms.REFUSED
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")


class Points:
    """Takes a snapshot at some batches of a program."""

    def __init__(self, session: Session, function: Callable[[], Any], wanted: Callable[[int], bool]) -> None:
        self.program = ProgramInProgress(session, {}, (library_settings, set_process_settings))
        call = Call(function=function, provided={}, sources=source_files(function))
        self.call: Callable[[], Any] = self.program.prepare(call, {}) or function
        self.taken: list[tuple[bytes, list[bytearray]]] = []
        self.reasons: Counter[str] = Counter()
        self._wanted, self._number = wanted, -1

    def point(self, iterator: Any) -> None:
        self._number += 1
        if not self._wanted(self._number):
            return
        try:
            pickled, buffers = self.program.pickle(self.program.frames(sys._getframe(1)), iterator)
            self.taken.append((pickled, [bytearray(one) for one in buffers]))
        except NoSnapshotError as error:
            self.reasons[str(error)] += 1


def taken(session: Session, function: Callable[[], Any], every: int = 1) -> tuple[Any, Points]:
    """The value of the program, and its snapshots."""
    points: Any = Points(session, function, lambda number: number % every == 0)
    session.events = Events()
    follow_loaders(session, points)
    seed_everything(7)
    with points.program.installed():
        return points.program.run(points.call), points


def resumed(session: Session, function: Callable[[], Any], snapshot: Any, at: int = 3) -> tuple[Any, Points]:
    """The value of the program that goes on from ``snapshot`` in a new image, and a snapshot that it takes itself."""
    points: Any = Points(session, function, lambda number: number == at)
    session.events = Events()
    follow_loaders(session, points)
    seed_everything(99)
    with points.program.installed():
        rest = points.program.restore(snapshot[0], [bytearray(one) for one in snapshot[1]])
        return points.program.run(rest), points


def check(function: Callable[[], Any], every: int) -> None:
    """Check that ``function`` goes on exactly, from snapshots of the program and of programs that have gone on."""

    def all_points(session: Session) -> Any:
        value, points = taken(session, function, every)
        for number, snapshot in enumerate(points.taken):
            if number and number == len(points.taken) // 2:
                continue  # another process goes on from this one
            again, later = resumed(session, function, snapshot)
            assert again == value, number
            for one in later.taken[:1] if number % 3 == 0 else ():
                assert resumed(session, function, one)[0] == value, f"{number}, again"
        return value, points.taken, points.reasons

    def plain(session: Session) -> Any:
        seed_everything(7)
        return function()

    def elsewhere(session: Session) -> Any:
        return resumed(session, function, snapshots[len(snapshots) // 2])[0]

    (found,) = run_ranks(1, all_points)
    value, snapshots, reasons = found
    assert snapshots
    assert all(any(part in reason for part in PUT_OFF) for reason in reasons), reasons
    assert run_ranks(1, plain) == [value]
    assert run_ranks(1, elsewhere) == [value]


PUT_OFF = ("lambda, comprehension or class body", "through a zip", "has computed *seen before its call")
"""Places that a program passes: the next batch after them has a snapshot again."""


AS_OTHERS = (
    *(idioms.scheduled, idioms.augmented, idioms.streamed, idioms.kept_tensors, idioms.logged, idioms.matched),
    *(idioms.one_function, idioms.closures),
)
"""Programs whose frames hold what those of others hold."""


@pytest.mark.parametrize(
    "function",
    [pytest.param(one, id=one.__name__, marks=pytest.mark.soak if one in AS_OTHERS else ()) for one in EXACT],
)
def test_a_program_goes_on_exactly(function: Callable[[], Any]) -> None:
    check(function, every=9)


@pytest.mark.soak
@pytest.mark.parametrize("function", worker_idioms.EXACT, ids=lambda function: function.__name__)
def test_a_program_whose_loaders_have_workers_goes_on_exactly(function: Callable[[], Any]) -> None:
    check(function, every=9)  # it takes some tenths of a second to begin workers again


@pytest.mark.soak  # the two tests above go on from some batches of some of these
@pytest.mark.parametrize(
    "function", [*EXACT, *worker_idioms.EXACT, *worker_idioms.RARELY_RUN], ids=lambda function: function.__name__
)
def test_a_program_goes_on_exactly_from_every_batch(function: Callable[[], Any]) -> None:
    check(function, every=1)


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_a_program_that_cannot_go_on_from_its_place_is_told_why(function: Callable[[], Any]) -> None:
    def reasons(session: Session) -> Any:
        return taken(session, function)[1].reasons

    (found,) = run_ranks(1, reasons)
    assert found, "it has taken snapshots"
    assert all(REFUSED[function] in reason for reason in found), found


def test_a_program_does_not_see_that_it_may_be_kept() -> None:
    def seen(session: Session) -> Any:
        return taken(session, refused_idioms.all_variables)[0]

    assert run_ranks(1, seen) == [["_", "first"]]


def test_a_stream_that_changes_itself_is_not_read_again() -> None:
    def go_on(session: Session) -> None:
        snapshots = taken(session, rare_idioms.counting_stream)[1].taken
        with pytest.raises(SnapshotError, match="does not repeat"):
            resumed(session, rare_idioms.counting_stream, snapshots[2])

    run_ranks(1, go_on)


def test_modules_that_a_function_imports_are_among_its_sources() -> None:
    names = source_files(rare_idioms.other_modules)
    assert {"rare_idioms.py", "counted_losses.py"} <= {name.rpartition("/")[2] for name in names}
