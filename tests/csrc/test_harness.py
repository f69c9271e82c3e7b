"""Runs ``csrc/tests``: ranks as threads, under AddressSanitizer and ThreadSanitizer."""

from __future__ import annotations

import faulthandler
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="no cmake or no C++ compiler to build it with"
)


def built(sanitizers: str) -> Path:
    """Build ``harness`` in ``build``, unless it was built there from the same sources."""
    # Not in pytest's cache, which .ci/tests clears: the two builds take longer than what they are built for.
    folder = ROOT / "build" / "csrc-tests" / (sanitizers.partition(",")[0] or "plain")
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    if (built_from := folder / "built_from").exists() and built_from.read_text() == digest:
        return folder / "harness"
    faulthandler.cancel_dump_traceback_later()  # which would end the tests after two minutes, however slow the machine
    configured = ["-DLAGOM_HARNESS=ON", f"-DLAGOM_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), *configured],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    built_from.write_text(digest)
    return folder / "harness"


def run(harness: Path, rounds: int) -> str:
    done = subprocess.run([harness, str(rounds)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.soak  # builds for half a minute what tests/exchange runs without sanitizers by default
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_ranks_as_threads_exchange_without_a_fault_that_a_sanitizer_sees(sanitizers: str) -> None:
    assert run(built(sanitizers), 150) == "ok\n"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizers", ["", "address,undefined", "thread"])
def test_a_million_mixed_exchanges(sanitizers: str) -> None:
    # Four sizes of world, two to five exchanges a round.
    assert run(built(sanitizers), 300_000 if not sanitizers else 30_000) == "ok\n"
