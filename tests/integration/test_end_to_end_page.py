"""The page that leads from a Spark table to scores works as pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
PAGE = Path(__file__).parents[2] / "docs" / "end_to_end.md"


@pytest.mark.timeout(600)  # it runs for 40 s alone, and beside five others for more than 180
def test_the_blocks_of_the_page_train_score_and_save(tmp_path: Path) -> None:
    blocks = re.findall(r"```python no-run\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "pasted.py").write_text("\n".join(blocks))
    activated = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [sys.executable, "pasted.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": activated, "LAGOM_RUN_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    accuracy = re.search(r"accuracy (\S+) in", ran.stdout)
    assert accuracy is not None, ran.stdout
    assert float(accuracy[1]) > 0.9
    assert {"scores", "plan_indexer", "churn.pt"} <= {path.name for path in tmp_path.iterdir()}
    scored = [row.split("|") for row in ran.stdout.splitlines() if re.match(r"\|\s+\d+\|", row)]
    assert len(scored) == 10  # before and after the model was saved
    assert scored[:5] == scored[5:]
    assert all((float(row[4]) > 0.5) == (float(row[3]) > 0) for row in scored)
