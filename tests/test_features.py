"""``docs/features.md`` counts a feature as kept only where tests that exist show it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NUM_FEATURES = 126
NOT_YET = "not yet"


def test_every_feature_stands_there_once() -> None:
    numbers = [number for number, _ in _rows((ROOT / "docs" / "features.md").read_text())]
    assert numbers == list(range(1, NUM_FEATURES + 1))


def test_every_test_that_is_named_exists() -> None:
    rows = _rows((ROOT / "docs" / "features.md").read_text())
    assert [line for number, proof in rows for line in faults(number, proof, ROOT)] == []


def test_every_feature_has_a_test_by_default(request: pytest.FixtureRequest) -> None:
    proofs = {number: set(_named(proof)) for number, proof in _rows((ROOT / "docs" / "features.md").read_text())}
    collected = _collected(request, sorted({name.partition("::")[0] for names in proofs.values() for name in names}))
    assert [number for number, names in proofs.items() if names and not names & collected] == []


def _collected(request: pytest.FixtureRequest, files: list[str]) -> set[str]:
    """Return the tests of ``files`` that run without an option: this process has them if it runs all tests."""
    config = request.config
    chosen = config.args, config.option.markexpr, config.option.keyword, config.getoption("lf", False)
    if chosen == (["tests"], "not soak", "", False):
        return {item.nodeid.partition("[")[0] for item in request.session.items}
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line.partition("[")[0] for line in listed.splitlines()}


def test_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "def test_b(): ...\nclass TestC:\n    async def test_d(self): ...\ndef helper(): ...\n"
    )
    good = "`tests/test_a.py::test_b`, `tests/test_a.py::TestC::test_d`"
    assert faults(1, good, tmp_path) == []
    assert faults(1, NOT_YET, tmp_path) == []
    for proof in ("", "yes", "`tests/test_a.py`", "`tests/test_a.py::test_d`", "`tests/test_a.py::helper`"):
        assert len(faults(1, proof, tmp_path)) == 1, proof
    assert len(faults(1, "`tests/test_gone.py::test_b`", tmp_path)) == 1
    assert len(faults(1, good + ", `tests/test_a.py::test_e`", tmp_path)) == 1


def faults(number: int, proof: str, root: Path) -> list[str]:
    """Return the faults in the last column of row ``number``."""
    if proof == NOT_YET:
        return []
    names = _named(proof)
    if not names or re.sub(r"`[^`]+`|[\s,]", "", proof):
        return [f"row {number} says {proof!r}; want `tests/path.py::test_name`, ... or {NOT_YET!r}"]
    return [f"row {number} names {name}, which does not exist" for name in names if not _exists(name, root)]


def _named(proof: str) -> list[str]:
    return re.findall(r"`([^`]+)`", proof)


def _exists(name: str, root: Path) -> bool:
    file, *parts = name.split("::")
    if not parts or not parts[-1].startswith("test_") or not (root / file).is_file():
        return False
    return tuple(parts) in _defined(root / file)


@functools.cache
def _defined(path: Path) -> frozenset[tuple[str, ...]]:
    """Functions and classes of a file, each by its names from the outermost on."""
    return frozenset(_names(ast.parse(path.read_text()).body, ()))


def _names(body: Iterable[ast.stmt], outer: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield (*outer, node.name)
            yield from _names(node.body, (*outer, node.name))


def _rows(text: str) -> list[tuple[int, str]]:
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if re.match(r"\| *\d+ *\|", line)]
    return [(int(cells[0]), cells[-1].strip()) for cells in rows]
