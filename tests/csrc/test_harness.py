"""``csrc/tests/harness.cpp``: ranks as threads, under AddressSanitizer and ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="no cmake or no C++ compiler to build it with"
)


def built(folder: Path, sanitizers: str) -> Path:
    configured = ["-DLAGOM_HARNESS=ON", f"-DLAGOM_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), *configured],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "harness"


def run(harness: Path, rounds: int) -> str:
    done = subprocess.run([harness, str(rounds)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_ranks_as_threads_exchange_without_a_fault_that_a_sanitizer_sees(tmp_path: Path, sanitizers: str) -> None:
    assert run(built(tmp_path, sanitizers), 150) == "ok\n"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizers", ["", "address,undefined", "thread"])
def test_a_million_mixed_exchanges(tmp_path: Path, sanitizers: str) -> None:
    # Four sizes of world, two to five exchanges a round.
    assert run(built(tmp_path, sanitizers), 300_000 if not sanitizers else 30_000) == "ok\n"
