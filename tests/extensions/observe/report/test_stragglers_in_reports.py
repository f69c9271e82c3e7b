"""Stragglers in the report of a run."""

from __future__ import annotations

import json
from pathlib import Path

from lagom.extensions.observe.report.report import report
from lagom.run_folder import RunFolder
from tests.watch.test_stragglers import says


def test_the_report_says_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": "x"}')
    events = [
        {"rank": 0, "seconds": 1, **says(0.4, rank_1=0.4)._asdict()},
        {"rank": 1, "seconds": 1, **says(0.0)._asdict()},
    ]
    (tmp_path / "progress.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "The others waited 40% of their time for rank 1." in report(RunFolder.open(tmp_path))
