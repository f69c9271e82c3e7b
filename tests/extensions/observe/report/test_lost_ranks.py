"""Ranks that were lost, in the report and the timeline of a run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.driver import losses
from tests.driver.test_attempts import run


def test_the_report_and_the_timeline_show_what_was_lost(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with losses.killed([Path(f"{gate}-1")], losses.kill_rank(1, tmp_path / "runs")):
        result = run(lambda: losses.train(str(gate)), tmp_path, timeline=True, hb_interval=0.05)
    assert result.run_dir is not None
    page = result.report().read_text()
    assert "What was lost" in page
    assert "rank 1 was killed by SIGKILL" in page.partition("What was lost")[2]
    events = json.loads((result.run_dir / "timeline.json").read_text())["traceEvents"]
    (mark,) = [event for event in events if event.get("cat") == "loss"]
    assert mark["ts"] < 0  # before the first span of the attempt that went on
    assert "lost in attempt 1: rank 1 was killed by SIGKILL" in mark["name"]
    backwards = [event for event in events if event["name"] == "backward" and event["pid"] == 0]
    assert len(backwards) == 15
    assert (result.run_dir / "timelines-lost-1").is_dir()
