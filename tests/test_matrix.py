"""``make matrix``: the columns are those that lagom promises, and a result becomes a line of docs/versions.md."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lagom.session.patched import NEWEST, OLDEST
from tests import matrix


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of ``version``."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


def test_the_columns_reach_from_the_oldest_to_the_newest_promised_version() -> None:
    torches = [minor(column.torch) for column in matrix.COLUMNS]
    assert (min(torches), max(torches)) == (OLDEST, NEWEST)
    text = (matrix.ROOT / "pyproject.toml").read_text()
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in text
    assert f'requires-python = ">={matrix.COLUMNS[0].python}"' in text
    sentence = "Python 3.10 to 3.14, torch {}.{} to {}.{}, PySpark 4.0 to 4.3".format(*OLDEST, *NEWEST)
    assert sentence in matrix.PAGE.read_text()
    sparks = [minor(column.pyspark) for column in matrix.COLUMNS]
    assert (min(sparks), max(sparks)) == ((4, 0), (4, 3))


def test_the_checks_run_in_a_column() -> None:
    pinned = {column for column in matrix.COLUMNS if column.torch == metadata.version("torch").split("+")[0]}
    if not pinned:
        pytest.skip("these checks run on another torch, in a column of the matrix")
    assert metadata.version("pyspark") in {column.pyspark for column in pinned} | {"none"}


def test_a_result_replaces_the_line_of_its_column(tmp_path: Path) -> None:
    page = tmp_path / "versions.md"
    shutil.copy(matrix.PAGE, page)
    before = page.read_text().splitlines()
    for column in matrix.COLUMNS:
        line = matrix.row(column, matrix.Counts(5, 1, 2), 90.0, ("tests/gradients", "-k", "Adam"))
        matrix.write_row(page, column, line)
        assert f"| {column.python} | {column.torch} | {column.pyspark} | 5 passed, 1 failed, 2 skipped | 2 | 2" in line
    after = page.read_text().splitlines()
    assert len(after) == len(before)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == len(matrix.COLUMNS)


@pytest.mark.soak  # make matrix shows it
def test_tests_are_run_and_counted(tmp_path: Path) -> None:
    program = tmp_path / "test_it.py"
    program.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_d(broken): pass\n"
    )
    tests = (str(program), f"--rootdir={tmp_path}", "-c", str(tmp_path / "none.ini"))
    (tmp_path / "none.ini").write_text("[pytest]\n")
    counts, seconds = matrix.run(Path(sys.executable), tests, "1", 120.0)
    assert counts == matrix.Counts(1, 2, 1)
    assert seconds < 120
    assert matrix.run(Path(sys.executable), tests, "1", 0.01)[0] is None
