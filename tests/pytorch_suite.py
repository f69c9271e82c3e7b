"""PyTorch's own tests in a plain process and under ``lagom run -n 2``: ``python -m tests.pytorch_suite``.

Their source is Debian's package of PyTorch (2.6, which also runs with a newer torch: a test that fails plainly counts
for nothing). It is downloaded to build/pytorch-suite by apt-get, with lists of its own.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tarfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

VERSION = "2.6.0+dfsg-7"
FOLDER = ROOT / "build" / "pytorch-suite"
FILES = ("test_autograd", "test_optim", "nn/test_module_hooks", "nn/test_load_state_dict", "nn/test_parametrization")
TIMEOUT_S = 3600
SOURCES = """Types: deb-src
URIs: http://deb.debian.org/debian
Suites: trixie
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
LEFT_OUT = ("TestMultithreadAutograd",)
"""Classes in which threads train at the same time: an error on ranks, of which later tests would see something."""
COMPILES = ("load_inline", "cpp_extension")
"""Names in the code of tests that compile C++ for minutes, which are left out."""


def download() -> Path:
    """Return the folder of PyTorch's tests; download and unpack it if it is not there."""
    tests = FOLDER / "test"
    if tests.exists():
        return tests
    for name in ("parts", "lists/partial", "cache/archives/partial"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
    (FOLDER / "parts" / "debian.sources").write_text(SOURCES)
    places = {"Etc::SourceList": "/dev/null", "Etc::SourceParts": FOLDER / "parts"}
    places |= {"State::Lists": FOLDER / "lists", "Cache": FOLDER / "cache"}
    options = [word for name, place in places.items() for word in ("-o", f"Dir::{name}={place}")]
    source = ["source", "--download-only", "--tar-only", f"pytorch={VERSION}"]
    for command in (["update"], source):
        subprocess.run(["apt-get", *options, *command], cwd=FOLDER, check=True)
    (archive,) = FOLDER.glob("pytorch_*.orig.tar.xz")
    with tarfile.open(archive) as tar:
        for member in tar:
            member.name = member.name.partition("/")[2]
            if member.name.startswith("test/") and member.name.endswith(".py"):
                tar.extract(member, FOLDER, filter="data")
    return tests


def outcomes(file: str, num_ranks: int | None = None) -> dict[str, str]:
    """Run the tests of a file, plainly or on ranks; return the outcome of each by its name."""
    tests = download()
    script = [str(Path(__file__)), str(tests), file]
    run = [str(Path(sys.executable).with_name("lagom")), "run", "-n", str(num_ranks)]
    done = subprocess.run(
        [*(run if num_ranks else [sys.executable]), *script],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    assert lines, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return {name: outcome for _, name, outcome in lines}


def lost(file: str, num_ranks: int = 2) -> tuple[int, dict[str, str]]:
    """Return how many tests pass plainly, and the outcomes on ranks of those among them that do not pass there."""
    plainly, found = outcomes(file), outcomes(file, num_ranks)
    passed = [name for name, outcome in plainly.items() if outcome == "passed"]
    return len(passed), {name: text for name in passed if (text := found.get(name, "did not run")) != "passed"}


class _Outcomes(unittest.TestResult):
    """Prints the outcome of each test at once."""

    def addSuccess(self, test: unittest.TestCase) -> None:
        print("OUTCOME", test.id(), "passed", flush=True)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        print("OUTCOME", test.id(), "failed", repr(f"{err[0].__name__}: {err[1]}"[:300]), flush=True)

    addError = addFailure

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        print("OUTCOME", test.id(), "skipped", repr(reason), flush=True)


def _cases(suite: Any) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _cases(one)
        else:
            yield one


def _is_left_out(case: unittest.TestCase) -> bool:
    if type(case).__name__ in LEFT_OUT:
        return True
    code = getattr(getattr(case, case._testMethodName), "__code__", None)
    return code is not None and not set(COMPILES).isdisjoint(code.co_names)


def run_file(tests: str, file: str) -> None:
    """Run the tests of a file in this process."""
    path = Path(tests) / file
    sys.path[:0] = [str(path.parent), tests]
    sys.argv = [f"{path}.py"]
    module = importlib.import_module(path.name)
    for case in _cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if not _is_left_out(case):
            case.run(_Outcomes())


def main() -> None:
    """Print how many tests of each file pass plainly, and those that do not pass on two ranks."""
    for file in FILES:
        num, missing = lost(file)
        print(f"{file}: {num - len(missing)} of {num}")
        for name, outcome in missing.items():
            print(f"  {name}: {outcome}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_file(*sys.argv[1:])
    else:
        main()
