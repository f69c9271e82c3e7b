"""``make matrix``: runs tests on each promised combination of Python, torch and pyspark; results in docs/versions.md.

``python -m tests.matrix`` runs all columns, one after another; ``python -m tests.matrix 3.10`` those of Python 3.10. A
column whose Python is not on PATH is skipped. ``--tests tests/gradients -k Adam`` runs these instead.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
PART = (
    *("tests/test_torch_names.py", "tests/test_training.py", "tests/program/test_payload.py", "tests/test_examples.py"),
    *(
        "tests/forward",
        "tests/gradients",
        "tests/forward/rows",
        "tests/optimizers",
        "tests/extensions/zero",
        "tests/batches",
    ),
    *("tests/run_state", "tests/patching", "tests/program", "tests/disk/test_file_idioms.py"),
    *("tests/extensions/observe/debugger/test_rank_debugger.py", "tests/extensions/compat/test_horovod_optimizer.py"),
    *("tests/programs/test_programs.py", "tests/programs/test_short.py"),
    *("tests/integration/test_kinds.py", "tests/extensions/data/integration/test_frames.py"),
)
"""Tests of what depends on the versions: torch's functions, Python's modules, and PySpark; with tests/programs."""
MAX_S = 3600.0


class Column(NamedTuple):
    """A combination of versions that lagom promises."""

    python: str
    torch: str
    pyspark: str


COLUMNS = (
    Column("3.10", "2.6.0", "4.0.5"),
    Column("3.11", "2.13.0", "4.3.0"),
    Column("3.12", "2.9.1", "4.1.4"),
    Column("3.13", "2.15.0", "4.2.1"),
    Column("3.14", "2.15.0", "4.3.0"),
)


class Counts(NamedTuple):
    """Numbers of tests."""

    passed: int
    failed: int
    skipped: int


def main() -> None:
    """Run the columns that the command line names, and write their rows."""
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__.split("\n")[0])
    parser.add_argument("pythons", nargs="*", help="only these columns, such as 3.12")
    parser.add_argument("--keep", action="store_true", help="leave a column's environment for the next time")
    parser.add_argument("--processes", default="2")
    parser.add_argument("--minutes", type=float, default=MAX_S / 60, help="end a column after so long")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=[], help="run these instead; the last option")
    args = parser.parse_args()
    for column in COLUMNS:
        if args.pythons and column.python not in args.pythons:
            continue
        python = shutil.which(f"python{column.python}")
        # pyenv has a name for every version, also for those that are not chosen.
        if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
            print(f"matrix: no python{column.python} on PATH; its column stays as it is")
            continue
        folder = ROOT / "build" / "matrix" / column.python
        try:
            install(python, column, folder)
            tests = tuple(args.tests) or PART
            counts, seconds = run(folder / "bin" / "python", tests, args.processes, args.minutes * 60)
        finally:
            if not args.keep:
                shutil.rmtree(folder, ignore_errors=True)  # with CUDA, torch alone is several GB
        write_row(PAGE, column, row(column, counts, seconds, tests))


def install(python: str, column: Column, folder: Path) -> None:
    """Make an environment for ``column`` in ``folder``, unless it is there."""
    if (folder / "installed").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"matrix: {column} into {folder}", flush=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    options = ("--disable-pip-version-check", "--quiet", "--no-cache-dir")
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", *options]
    # By itself and pinned: pip then takes a build for CPUs where the index has one.
    subprocess.run([*pip, f"torch=={column.torch}"], check=True)
    wanted = [f"torch=={column.torch}", f"pyspark=={column.pyspark}", "--editable", f"{ROOT}[dev,spark,connect]"]
    # The packages, and those that build lagom, whose variable older versions of pip do not know.
    pins = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(constraints(column)))
    subprocess.run([*pip, *wanted], check=True, env=os.environ | pins)
    (folder / "installed").touch()


def constraints(column: Column) -> Path:
    """Return the file with the versions of all other packages in ``column``."""
    return ROOT / "packaging" / "matrix" / f"{column.python}.txt"


def run(python: Path, tests: Sequence[str], processes: str, max_s: float) -> tuple[Counts | None, float]:
    """Run ``tests``; return their numbers, None if they did not end, and how long it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        options = ("-q", "-p", "no:cacheprovider", "-n", processes, f"--junitxml={report}")
        command: list[str | Path] = [python, "-m", "pytest", *options, *tests]
        environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        try:
            subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=max_s)
        except subprocess.TimeoutExpired:
            return None, time.monotonic() - started
        return read_counts(report.read_text()), time.monotonic() - started


def read_counts(report: str) -> Counts:
    """Return the numbers of tests in a report of pytest in JUnit's form."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return Counts(total - failed - errors - skipped, failed + errors, skipped)


def row(column: Column, counts: Counts | None, seconds: float, tests: Sequence[str]) -> str:
    """Return the line of the table for ``column``."""
    told = "did not end"
    if counts is not None:
        told = f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped"
    what = "`make matrix`" if tuple(tests) == PART else f"`{shlex.join(tests)}`"
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    return f"| {' | '.join(column)} | {told} | {seconds / 60:.0f} | {today} | {what} |"


def write_row(page: Path, column: Column, line: str) -> None:
    """Replace the line of ``column`` in the table of ``page``."""
    pattern = re.compile(rf"^\| {re.escape(' | '.join(column))} \|.*$", re.MULTILINE)
    text, count = pattern.subn(lambda _: line, page.read_text())
    if count != 1:
        raise ValueError(f"{page} has {count} rows for {column}; want one")
    page.write_text(text)


if __name__ == "__main__":
    main()
