"""``lagom.host.end_reports``: the reports of a whole task, and which of them tells the cause."""

from __future__ import annotations

import pytest

from lagom.host.end_reports import death_report, first_failure, fit_reports, stop_report
from lagom.on_rank.rank_call import pack_error
from lagom.wire.framing import body_of
from lagom.wire.messages import Done, RankReport


def error_report(rank: int, error: BaseException) -> RankReport:
    return pack_error(error, rank, {})[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 9, pytest.param(960, marks=pytest.mark.soak)])
def test_the_reports_of_any_number_of_ranks_fit_into_a_frame(num_ranks: int) -> None:
    errors = [error_report(rank, ValueError("first" + "ü" * 60_000 + "last")) for rank in range(num_ranks)]
    deaths = [death_report(rank, 9, b"\xff" * 8000 + b"last", {}) for rank in range(num_ranks)]
    for reports in (errors, deaths):
        fitted = fit_reports([*reports, stop_report(num_ranks)])
        assert body_of(Done(reports=fitted))
        assert [report.rank for report in fitted] == list(range(num_ranks + 1))
        for before, after in zip(reports, fitted, strict=False):
            assert before.message.startswith(after.message[:10])
            assert before.traceback.endswith(after.traceback[-4:])


def test_short_reports_stay_as_they_are() -> None:
    reports = [error_report(rank, KeyError("lr")) for rank in range(20)]
    assert fit_reports(reports) == reports


def test_a_rank_that_failed_by_itself_comes_before_one_that_missed_it() -> None:
    consequence = RankReport(rank=0, ok=False, consequence=True)
    cause = RankReport(rank=1, ok=False)
    returned = RankReport(rank=2, ok=True)
    assert first_failure([consequence, cause, RankReport(rank=3, ok=False)]) == cause
    assert first_failure([returned, consequence]) == consequence
    assert first_failure([returned, stop_report(3)]) is None
