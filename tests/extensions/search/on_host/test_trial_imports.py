"""``search.on_host.trial_imports``: libraries of a trial are tried out beside the next one, which is not held up."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lagom.extensions.search.on_host.trial_imports import TrialImports

SPEC: Any = SimpleNamespace(env=dict(os.environ), whole_env=False)


def library(folder: Path, first: str) -> list[str]:
    """Write 45 modules, the first one with the source ``first``."""
    name = f"library_{folder.name}"
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(first)
    for number in range(44):
        (folder / name / f"part{number}.py").write_text("")
    return [name, *(f"{name}.part{number}" for number in range(44))]


@pytest.mark.forked
@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("", True),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", False),
        ("import random\nrandom.random()", False),
        ("import os\nos._exit(3)", False),
    ],
)
def test_libraries_are_imported_once_a_child_has_found_them_harmless(
    source: str, imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    reader, writer = os.pipe()
    names = library(tmp_path, f"import os\nif os.getpid() != {os.getpid()}:\n    os.read({reader}, 1)\n{source}")
    imports = TrialImports(SPEC)
    imports.try_out(names[:20])
    assert imports.pids == []  # a few modules are not worth it
    imports.try_out(names)
    assert len(imports.pids) == 1
    assert imports.add() is False  # the child is still at it, and nothing waits for it
    os.write(writer, b"x")
    deadline = time.monotonic() + 60
    while not (was_added := imports.add()) and imports.pids and time.monotonic() < deadline:
        time.sleep(0.01)
    assert imports.pids == []
    assert was_added is imported
    assert (names[1] in sys.modules) is imported
    imports.try_out(names)
    assert imports.pids == []  # nothing is tried twice
    for fd in (reader, writer):
        os.close(fd)
