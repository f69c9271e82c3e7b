"""Measures rows per second read from Parquet: lagom, petastorm 0.12.1, Hugging Face's datasets, pyarrow as the limit.

    python -m benchmarks.parquet [--peer PYTHON] [--scale 0.1] [--only numbers] [--rounds 3]

Petastorm runs with the Python that ``--peer`` names. This may be the present Python, with the extras petastorm and
bench, where ``lagom.compat.petastorm`` makes petastorm work with today's pyarrow. Or it is an older environment:

    python3.11 -m venv PEER
    PEER/bin/pip install petastorm==0.12.1 pyarrow==14.0.2 numpy==1.26.4 pandas==2.2.3 torch==2.6.0 \
        pyspark opencv-python-headless==4.10.0.84 "setuptools<70"

Each contender runs in a process of its own, for at least three passes over a table and at least a second; the first
pass does not count. The machine's speed can change by a factor within minutes, so contenders take turns in rounds.
Ratios compare contenders of one round; the table has the median of the rounds, and the least and the most. The first
round runs all configurations of petastorm in ``benchmarks/petastorm_peer.py``; later rounds run the best one. Petastorm
shuffles within as many rows as lagom's window holds. torch's DataLoader over datasets runs in the first round only, and
returns undecoded cells. lagom decodes in as many threads as torch has, beside the program's own. "The scan" is
pyarrow's ``read_row_group`` over the same columns: it decodes columns in as many threads, so a single column in one. A
scan of several row groups at once shows the most that the disk and pyarrow can deliver.
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
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.rates import Rate, rate

ROOT = Path(__file__).parent.parent
PEER = str(ROOT / "benchmarks" / "petastorm_peer.py")
KINDS = ("in order", "shuffled")
BATCH = {"numbers": 1024, "lists": 1024, "arrays": 256, "images": 64}
"""Rows of a batch, by table."""
ROWS = {"numbers": 1_000_000, "lists": 400_000, "arrays": 40_000, "images": 2_000}
WINDOW_BYTES = 128 << 20
SCANS = "pyarrow, several row groups at once"
# Least ratios of lagom's rows per second to petastorm's best of the same kind, and to the scan; None: no target.
TARGETS = {
    ("numbers", "shuffled"): (5.0, 0.3),
    ("numbers", "in order"): (2.5, 0.5),
    ("lists", "shuffled"): (2.0, None),
    ("lists", "in order"): (3.0, None),
    ("arrays", "shuffled"): (10.0, None),
    ("images", "shuffled"): (2.0, None),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table of all contenders; return 0 if all measured targets hold, else 1."""
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
            rounds = _rounds(args, folder, table)
            for name in rounds[0]:
                some = [one[name] for one in rounds if name in one]
                rows_s, mb_s, peak = (median(values) for values in zip(*some, strict=True))
                speed = f"{rows_s / 1e6:8.3f} M rows/s {mb_s:8.0f} MB/s"
                print(f"  {name:38} {_threads(name, table):11} {speed} {peak:6.0f} MB peak")
            held = min([held, *(_judged(table, kind, rounds) for kind in KINDS)])
    return 0 if held else 1


def _rounds(args: argparse.Namespace, folder: str, table: str) -> list[dict[str, Rate]]:
    """Return the rates of all contenders, by round. After the first round, only petastorm's best configurations run."""
    found: list[dict[str, Rate]] = []
    chosen = _peers(args.peer, table)
    for _ in range(args.rounds):
        names = [name for name in _contenders() if not found or not name.startswith("torch")]
        found.append({name: _run(name, folder, table) for name in names})
        found[-1] |= {f"petastorm, {name}": _peer(args.peer, name, folder, table) for name in chosen}
        if len(found) == 1:
            chosen = [name for kind in KINDS for name in _best(chosen, kind, found[0])]
    return found


def _best(names: Sequence[str], kind: str, found: dict[str, Rate]) -> list[str]:
    some = [name for name in names if name.endswith(kind)]
    return sorted(some, key=lambda name: found[f"petastorm, {name}"].rows_s)[-1:]


def _judged(table: str, kind: str, rounds: Sequence[dict[str, Rate]]) -> bool:
    """Print lagom's ratios to the scan and to petastorm; return whether their targets hold."""
    of_peer, of_scan = TARGETS.get((table, kind), (None, None))
    peers = [name for name in rounds[-1] if name.startswith("petastorm") and name.endswith(kind)]
    told = []
    held = True
    for names, wanted, what in (
        (["pyarrow, scan"], of_scan, "of the scan"),
        ([SCANS], None, f"of {SCANS}"),
        (peers, of_peer, "times petastorm's best"),
    ):
        ratios = [one[f"lagom, {kind}"].rows_s / one[name].rows_s for one in rounds for name in names]
        if ratios:
            holds = wanted is None or median(ratios) >= wanted
            held &= holds
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) {what}"
            told.append(spread + ("" if wanted is None else f", wanted {wanted}: {'holds' if holds else 'MISSED'}"))
    print(f"  lagom, {kind}: " + "; ".join(told))
    return held


def _threads(name: str, table: str) -> str:
    """Return for the table which threads or processes decode, beside the program's own thread."""
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


def _peers(python: str | None, table: str) -> list[str]:
    """Return the names of petastorm's configurations for ``table``; empty without ``--peer``."""
    if python is None:
        return []
    command = [python, PEER, "list", table]
    names: list[str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return names


def _peer(python: str, name: str, folder: str, table: str) -> Rate:
    window = WINDOW_BYTES // 4 // _row_bytes(table)
    rest = [folder, table, str(BATCH[table]), str(window), str(_num_rows(folder)), str(_row_bytes(table))]
    return _result([python, "-W", "ignore", PEER, "read", name, *rest])


def _result(command: list[str]) -> Rate:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment(command), check=False)
    if done.returncode:
        print(f"{' '.join(command[3:7])}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return Rate(float("nan"), float("nan"), float("nan"))
    return Rate(**json.loads(done.stdout.strip().splitlines()[-1]))


def _environment(command: list[str]) -> dict[str, str]:
    """Return the environment for ``command``; another Python must not inherit this one's PYTHONPATH."""
    is_own = command[0] == sys.executable
    return {name: value for name, value in os.environ.items() if is_own or name != "PYTHONPATH"}


def _write(folder: str, table: str, count: int, peer: str | None) -> bool:
    Path(folder).mkdir()
    if table in ("arrays", "images"):
        if peer is None:
            return False
        command = [peer, "-W", "ignore", PEER, "write", folder, table, str(count)]
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
    return {"numbers": 80, "lists": 256, "arrays": 3072, "images": 224 * 224 * 3}[table]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python of an environment with petastorm; without it petastorm is left out")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tables")
    parser.add_argument("--rounds", type=int, default=3, help="in which all contenders run in turn")
    parser.add_argument("--only", choices=list(ROWS))
    for hidden in ("--contender", "--folder", "--table"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
