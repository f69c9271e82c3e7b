"""Output of a program in the report of its run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lagom import cli
from lagom.extensions.observe.report.report import report
from lagom.run_folder import RunFolder


def test_what_lagom_logs_is_not_among_the_programs_output_in_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(
        "import logging, sys\nprint('begun')\nsys.stderr.write('3/4')\n"
        "logging.getLogger('lagom').warning('runs whole')\nprint('ended')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", list(sys.path))
        assert cli.main(["run", "--master", "local", "-n", "2", "--run-dir", "runs", "program.py"]) == 0
        assert cli.main(["run", "--master", "local", "-n", "2", "--log", "all", "program.py"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    for rank in (0, 1):
        written = (folder / f"rank-{rank}.log").read_text()
        assert sorted([written.replace("3/4", ""), "3/4"]) == ["3/4", "begun\nended\n"]
    assert "lagom: runs whole" in (folder / "lagom.log").read_text().splitlines()
    assert re.findall("<pre class=wraps>([^<]*runs whole[^<]*)</pre>", report(RunFolder.open(folder))) == [
        (folder / "lagom.log").read_text().rstrip("\n")
    ]
    shown = capfd.readouterr().err
    assert shown.count("lagom: runs whole") == 3
    assert shown.count("\nlagom: runs whole") == 1
    assert all(f"[rank {rank}] lagom: runs whole\n" in shown for rank in (0, 1))
