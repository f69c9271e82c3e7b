"""Versions that a release, the pages and the test environments are built with: none is taken as it comes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.matrix import COLUMNS, constraints

ROOT = Path(__file__).parent.parent
FILES = (
    *("constraints.txt", "docs/requirements.txt", "packaging/requirements.txt", "packaging/constraints.txt"),
    *("tests/programs/packages/requirements.txt", "tests/programs/packages/constraints.txt"),
    *(str(constraints(column).relative_to(ROOT)) for column in COLUMNS),
)


def names(path: Path | str) -> set[str]:
    """Return the packages of a file, each of which has one version."""
    found = set()
    for line in (ROOT / path).read_text().splitlines():
        if text := line.partition("#")[0].strip():
            pinned = re.fullmatch(r"([\w.-]+)==[\w.]+( ; python_full_version .*)?", text)
            assert pinned, f"{path}: {text}"
            found.add(re.sub(r"[-_.]+", "-", pinned[1]).lower())
    return found


@pytest.mark.parametrize("path", FILES)
def test_each_package_has_one_version(path: str) -> None:
    assert names(path)


def test_all_that_builds_a_wheel_is_pinned() -> None:
    pinned = names("packaging/constraints.txt")
    assert names("packaging/requirements.txt") <= pinned
    (build,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    needed = {*re.findall(r'"([\w-]+)', build), "cmake", "ninja", "pip"}
    assert needed <= pinned
    for column in COLUMNS:
        assert needed - {"pip"} <= names(constraints(column))
