"""Timelines and breakpoints of ranks whose host cannot reach the driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lagom
import lagom.driver.run
import lagom.spark.spark
import lagom.spark.spark_session
from lagom.errors import LagomError
from tests.integration import programs

pytestmark = pytest.mark.parametrize("spark", ["local[2]", "standalone"], indirect=True, scope="session")


@pytest.fixture
def out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has no address that executors could know."""
    facts = lagom.spark.spark_session.session_facts

    def without_address(session: Any) -> Any:
        found = facts(session)
        found.bind = None
        return found

    monkeypatch.setattr(lagom.spark.spark, "session_facts", without_address)


@pytest.mark.usefixtures("out_of_reach")
def test_weights_and_a_timeline_come_with_the_job(spark: Any, tmp_path: Path) -> None:
    result = programs.run(
        programs.train, 2, module=programs.Net, train_set=programs.points(), timeline=True, run_dir=tmp_path
    )
    assert result.run_dir is not None
    events = json.loads((result.run_dir / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "backward"} == {0, 1}
    wanted = programs.plain_weights()
    assert all(programs.same_weights(found, wanted) for found in result.per_rank)


@pytest.mark.soak  # tests/extensions/observe/timeline/test_timeline.py shows it by default where the driver is reached
@pytest.mark.usefixtures("out_of_reach")
def test_a_run_that_fails_while_a_rank_waits_leaves_its_timeline_too(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(programs.LateError, match="a bad sample") as caught:
        programs.run(
            programs.raise_while_the_other_reduces,
            2,
            module=programs.Net,
            train_set=programs.points(),
            timeline=True,
            run_dir=tmp_path,
        )
    assert "on rank 1" in str(caught.value.__cause__)
    (trace,) = tmp_path.glob("*/timeline.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert 1 in {event["pid"] for event in events if event["name"] == "backward"}


@pytest.mark.soak  # tests/extensions/observe/debugger/test_rank_debugger.py has nobody who can type by default
@pytest.mark.usefixtures("out_of_reach")
def test_a_breakpoint_says_that_the_driver_cannot_be_reached(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        breakpoint()

    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    with pytest.raises(LagomError, match=r"breakpoint.* on rank 0, and the driver cannot be reached from its host"):
        programs.run(stop, 2)
