"""Runs ``csrc/tests``: ranks as threads, and damaged pages, under AddressSanitizer and ThreadSanitizer."""

from __future__ import annotations

import faulthandler
import hashlib
import io
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="no cmake or no C++ compiler to build it with"
)


def built(sanitizers: str) -> Path:
    """Build ``harness`` in ``build``, unless it was built there from the same sources.

    The other programs of ``csrc/tests``, which have no threads, lie beside it, but with the sanitizer of threads.
    """
    # Not in pytest's cache, which .ci/tests clears: the two builds take longer than what they are built for.
    folder = ROOT / "build" / "csrc-tests" / (sanitizers.partition(",")[0] or "plain")
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    if (built_from := folder / "built_from").exists() and built_from.read_text() == digest:
        return folder / "harness"
    faulthandler.cancel_dump_traceback_later()  # which would end the tests after two minutes, however slow the machine
    configured = ["-DLAGOM_HARNESS=ON", f"-DLAGOM_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug"]
    targets = ["--target", "harness"] if sanitizers == "thread" else []
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), *configured],
        ["cmake", "--build", str(folder), "--parallel", "2", *targets],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    built_from.write_text(digest)
    return folder / "harness"


def run(harness: Path, rounds: int) -> str:
    done = subprocess.run([harness, str(rounds)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.soak  # builds for half a minute what tests/collectives and tests/data run without sanitizers by default
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_ranks_as_threads_exchange_without_a_fault_that_a_sanitizer_sees(tmp_path: Path, sanitizers: str) -> None:
    harness = built(sanitizers)
    assert run(harness, 150) == "ok\n"
    if sanitizers == "thread":
        return  # nothing of what follows has threads
    pages = tmp_path / "pages"
    pages.write_bytes(b"".join(paged(random.Random(seed)) for seed in range(3000)))
    done = subprocess.run([harness.with_name("paging"), pages], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == "ok, 3000 cases\n"


def paged(drawn: random.Random) -> bytes:
    """Return the bytes of one case for ``csrc/tests/paging.cpp``: the pages of a column as Arrow writes them.

    Four cases of five have flipped bits.
    """
    count = drawn.choice([1, 9, 200])
    is_bytes = drawn.random() < 0.5
    prefix = b"head" if is_bytes else b""
    each = drawn.choice([4, 8])
    some = [drawn.randbytes(each) for _ in range(drawn.choice([1, 3, 100]))]
    values = [drawn.choice(some) for _ in range(count)]
    if is_bytes:
        made = pa.array([prefix + value for value in values], pa.binary())
    else:
        made = pa.Array.from_buffers(
            pa.int32() if each == 4 else pa.int64(), count, [None, pa.py_buffer(b"".join(values))]
        )
    is_snappy, is_optional = drawn.random() < 0.5, drawn.random() < 0.5
    sink = io.BytesIO()
    pq.write_table(
        pa.table([made], pa.schema([pa.field("x", made.type, is_optional)])),
        sink,
        compression="snappy" if is_snappy else "none",
        use_dictionary=drawn.random() < 0.6,
        data_page_version=drawn.choice(["1.0", "2.0"]),
        data_page_size=drawn.choice([50, 1 << 20]),
        write_page_checksum=drawn.random() < 0.1,
        dictionary_pagesize_limit=drawn.choice([30, 1 << 20]),
        write_batch_size=drawn.choice([5, 1024]),
    )
    column = pq.ParquetFile(sink).metadata.row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(sink.getvalue()[start : start + column.total_compressed_size])
    num_faults = drawn.choice([0, 1, 1, 2, 5])
    for _ in range(num_faults):
        data[drawn.choice([drawn.randrange(len(data)), drawn.randrange(min(len(data), 30))])] ^= 1 << drawn.randrange(8)
    if num_faults and drawn.random() < 0.1:
        del data[drawn.randrange(len(data)) :]
    head = struct.pack("=8I", is_snappy, is_optional, is_bytes, len(prefix), each, len(data), count, not num_faults)
    return head + prefix + bytes(data) + (b"" if num_faults else b"".join(values))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizers", ["", "address,undefined", "thread"])
def test_a_million_mixed_exchanges(sanitizers: str) -> None:
    # Four sizes of world, two to five exchanges a round.
    assert run(built(sanitizers), 300_000 if not sanitizers else 30_000) == "ok\n"
