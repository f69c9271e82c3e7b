"""``Script``: a module is found and runs as ``python -m`` finds and runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lagom.program.script import Script


def test_a_folder_without_an_init_runs_by_its_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lagom_space"
    folder.mkdir()
    (folder / "part.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="there is no module 'lagom_space"):
        Script.of_module("lagom_space", [])
    text = "import sys\nfrom .part import x\nprint(__name__, __package__, __spec__.name, __file__, sys.argv, x)\n"
    (folder / "__main__.py").write_text(text)
    by_lagom = "import sys; from lagom.program.script import Script; Script.of_module(sys.argv[1], sys.argv[2:])()"
    said = [
        subprocess.run(
            [sys.executable, *how, "lagom_space", "--epochs", "3"], cwd=tmp_path, capture_output=True, check=True
        )
        for how in (["-m"], ["-c", by_lagom])
    ]
    assert said[0].stdout == said[1].stdout != b""
