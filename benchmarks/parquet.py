"""Rows a second out of Parquet: lagom, petastorm 0.12.1, torch over Hugging Face's datasets, and pyarrow as the limit.

    python -m benchmarks.parquet [--peer PYTHON] [--scale 0.1] [--only numbers]

Petastorm does not import with today's pyarrow, so it runs in an environment of its own, whose Python ``--peer`` names:

    python3.11 -m venv PEER
    PEER/bin/pip install petastorm==0.12.1 pyarrow==14.0.2 numpy==1.26.4 pandas==2.2.3 torch==2.6.0 \
        pyspark opencv-python-headless==4.10.0.84 "setuptools<70"

Each contender runs in a process of its own, for three passes over a table and a second at least, of which the first
pass is not counted. Of petastorm all configurations in ``benchmarks/petastorm_peer.py`` run, and the best one counts;
it shuffles within as many rows as lagom's window has. lagom decodes in as many threads as torch has, beside the
program's own. "The scan" is pyarrow's ``read_row_group`` over the same columns, which decodes these in as many threads,
or in one where there is one column; what the disk and pyarrow can give at most is a scan of several row groups at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.rates import Rate, rate

ROOT = Path(__file__).parent.parent
BATCH = {"numbers": 1024, "lists": 1024, "arrays": 256, "images": 256}
"""Rows of a batch, by table."""
ROWS = {"numbers": 1_000_000, "lists": 400_000, "arrays": 40_000, "images": 20_000}
WINDOW_BYTES = 128 << 20
SCANS = "pyarrow, a scan of several row groups at once"
# Against petastorm's best of the same kind, and against the scan; from issue and prototypes.
TARGETS = {
    ("numbers", "shuffled"): (5.0, 0.3),
    ("numbers", "in order"): (2.5, 0.7),
    ("lists", "shuffled"): (2.0, None),
    ("lists", "in order"): (3.0, None),
    ("arrays", "shuffled"): (25.0, None),
    ("images", "shuffled"): (2.0, None),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of all contenders; 0 when the targets hold that could be measured, else 1."""
    args = _arguments(argv)
    if args.contender:
        print(json.dumps(_contenders()[args.contender](args.folder, args.table)._asdict()))
        return 0
    held = True
    with tempfile.TemporaryDirectory() as scratch:
        for table in [args.only] if args.only else ROWS:
            folder = f"{scratch}/{table}"
            if not _write(folder, table, int(ROWS[table] * args.scale), args.peer):
                print(f"{table}: not measured, as petastorm writes it: see --help for --peer")
                continue
            print(f"\n{table}: {int(ROWS[table] * args.scale)} rows, batches of {BATCH[table]}")
            found = {name: _run(name, folder, table) for name in _contenders()}
            found |= _peer(args.peer, folder, table)
            for name, one in found.items():
                speed = f"{one.rows_s / 1e6:8.3f} M rows/s {one.mb_s:8.0f} MB/s"
                print(f"  {name:46} {_threads(name, table):11} {speed} {one.peak_mb:6.0f} MB peak")
            held &= _judged(table, found)
    return 0 if held else 1


def _judged(table: str, found: dict[str, Rate]) -> bool:
    held = True
    for kind in ("in order", "shuffled"):
        ours = found[f"lagom, {kind}"].rows_s
        peers = [one.rows_s for name, one in found.items() if name.startswith("petastorm") and f", {kind}" in name]
        of_peer, of_scan = TARGETS.get((table, kind), (None, None))
        scan = ours / found["pyarrow, scan"].rows_s
        told = [f"{scan:.2f} of the scan" + (f" (wanted {of_scan})" if of_scan else "")]
        held &= of_scan is None or scan >= of_scan
        if peers:
            ratio = ours / max(peers)
            told.append(f"{ratio:.1f} times petastorm's best" + (f" (wanted {of_peer})" if of_peer else ""))
            held &= of_peer is None or ratio >= of_peer
            limit = found[SCANS].rows_s / max(peers)
            if of_peer is not None and ratio < of_peer:
                told.append(f"MISSED; {SCANS} is itself {limit:.1f} times petastorm's best")
        print(f"  lagom, {kind}: {', '.join(told)}")
    return held


def _threads(name: str, table: str) -> str:
    """What decodes, beside the program's own thread."""
    if name.startswith("petastorm"):
        pool, workers = name.split(", ")[1].split()
        return f"{workers} {'processes' if pool == 'process' else 'threads'}"
    if name.startswith("torch"):
        return "its own"
    return f"{1 if name == 'pyarrow, scan' and table != 'numbers' else _num_threads()} threads"


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _contenders() -> dict[str, Callable[[str, str], Rate]]:
    return {
        "lagom, in order": lambda folder, table: _lagom(folder, table, shuffle=False),
        "lagom, shuffled": lambda folder, table: _lagom(folder, table, shuffle=True),
        "torch over datasets, in order": lambda folder, table: _datasets(folder, table, shuffle=False),
        "torch over datasets, shuffled": lambda folder, table: _datasets(folder, table, shuffle=True),
        "pyarrow, scan": _scan,
        SCANS: _scans,
    }


def _lagom(folder: str, table: str, *, shuffle: bool) -> Rate:
    from lagom import PetastormDataLoader

    loader = PetastormDataLoader(folder, BATCH[table], shuffle=shuffle, window_bytes=WINDOW_BYTES)

    def passes() -> Iterator[int]:
        while True:
            for batch in loader:
                yield len(next(iter(batch.values())))

    return rate(passes(), _num_rows(folder), _row_bytes(table))


def _datasets(folder: str, table: str, *, shuffle: bool) -> Rate:
    try:
        from datasets import load_dataset
    except ImportError:
        return Rate(float("nan"), float("nan"), float("nan"))
    from torch.utils.data import DataLoader

    with tempfile.TemporaryDirectory() as cache:
        data = load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train", cache_dir=cache)
        loader: Any = DataLoader(data.with_format("torch"), BATCH[table], shuffle=shuffle)

        def passes() -> Iterator[int]:
            while True:
                for batch in loader:
                    yield len(next(iter(batch.values())))

        return rate(passes(), _num_rows(folder), _row_bytes(table))


def _scan(folder: str, table: str) -> Rate:
    def passes() -> Iterator[int]:
        while True:
            for path in sorted(Path(folder).glob("*.parquet")):
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group).num_rows

    return rate(passes(), _num_rows(folder), _row_bytes(table))


def _scans(folder: str, table: str) -> Rate:
    def read(number: int) -> list[int]:
        file = pq.ParquetFile(paths[number % len(paths)], pre_buffer=False)
        return [file.read_row_group(group, use_threads=False).num_rows for group in range(file.num_row_groups)]

    paths = sorted(Path(folder).glob("*.parquet"))
    threads = _num_threads()

    def passes() -> Iterator[int]:
        waiting: deque[Future[list[int]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for number in itertools.count():
                waiting.append(pool.submit(read, number))
                if len(waiting) > threads:
                    yield from waiting.popleft().result()

    return rate(passes(), _num_rows(folder), _row_bytes(table))


def _run(name: str, folder: str, table: str) -> Rate:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.parquet", "--contender", name, "--folder", folder]
    return _result([*command, "--table", table])


def _peer(python: str | None, folder: str, table: str) -> dict[str, Rate]:
    if python is None:
        return {}
    script = str(ROOT / "benchmarks" / "petastorm_peer.py")
    names = json.loads(subprocess.run([python, script, "list", table], capture_output=True, check=True).stdout)
    window = WINDOW_BYTES // 4 // _row_bytes(table)
    rest = [folder, table, str(BATCH[table]), str(window), str(_num_rows(folder)), str(_row_bytes(table))]
    return {f"petastorm, {name}": _result([python, "-W", "ignore", script, "read", name, *rest]) for name in names}


def _result(command: list[str]) -> Rate:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment(command), check=False)
    if done.returncode:
        print(f"{' '.join(command[3:7])}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return Rate(float("nan"), float("nan"), float("nan"))
    return Rate(**json.loads(done.stdout.strip().splitlines()[-1]))


def _environment(command: list[str]) -> dict[str, str]:
    """Of the peer, without what this Python finds its packages by."""
    is_own = command[0] == sys.executable
    return {name: value for name, value in os.environ.items() if is_own or name != "PYTHONPATH"}


def _write(folder: str, table: str, count: int, peer: str | None) -> bool:
    Path(folder).mkdir()
    if table in ("arrays", "images"):
        if peer is None:
            return False
        script = str(ROOT / "benchmarks" / "petastorm_peer.py")
        command = [peer, "-W", "ignore", script, "write", folder, table, str(count)]
        subprocess.run(command, check=True, env=_environment(command))
        return True
    random = np.random.default_rng(0)
    if table == "numbers":
        columns: dict[str, Any] = {f"c{n}": random.standard_normal(count).astype(np.float32) for n in range(20)}
    else:
        values = pa.array(random.standard_normal(count * 64).astype(np.float32))
        columns = {"a": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * 64), values)}
    made = pa.table(columns)
    for part in range(4):  # 8 row groups in each of 4 files
        some = made.slice(part * count // 4, count // 4)
        pq.write_table(some, f"{folder}/part-{part}.parquet", row_group_size=-(-count // 32))
    return True


def _num_rows(folder: str) -> int:
    return sum(pq.ParquetFile(path).metadata.num_rows for path in Path(folder).glob("*.parquet"))


def _row_bytes(table: str) -> int:
    return {"numbers": 80, "lists": 256, "arrays": 3072, "images": 3072}[table]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python of an environment with petastorm; without it petastorm is left out")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tables")
    parser.add_argument("--only", choices=list(ROWS))
    for hidden in ("--contender", "--folder", "--table"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
