"""Tables in an object store: read over HTTP, by ranks and workers of a loader, with faults."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError
from lagom.session.session import Session
from tests.extensions.data.object_store import Store, object_store
from tests.extensions.data.tables import numbers
from tests.ranks import run_ranks


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with a table of 900 rows in 3 files; takes back the handler that loaders with workers set."""
    before = signal.getsignal(signal.SIGCHLD)
    numbers(tmp_path / "table", [[150] * 2] * 3)
    with object_store(tmp_path) as served:
        yield served
    signal.signal(signal.SIGCHLD, before)


def hasty(store: Store) -> Any:
    """A file system that tries once: how often pyarrow's default tries again is Amazon's affair."""
    return fs.S3FileSystem(
        access_key="key",
        secret_key="secret",
        region="us-east-1",
        scheme="http",
        endpoint_override=f"127.0.0.1:{store.port}",
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
    )


def rows(dataset: ParquetDataset, **options: Any) -> list[int]:
    try:
        return sorted(r for b in ParquetLoader(dataset, 50, shuffle=True, **options) for r in b["row"].tolist())
    finally:
        dataset.close()


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_a_table_in_a_store_is_read_here_and_in_workers(store: Store, num_workers: int) -> None:
    dataset = ParquetDataset(store.url("table"))
    if num_workers:
        assert rows(dataset) == list(range(900))  # so that workers are forked from a process with connections
    assert rows(dataset, num_workers=num_workers) == list(range(900))
    assert len(ParquetDataset(store.url("table/part-001.parquet").replace("s3:", "s3a:"))) == 300


def test_an_object_that_is_written_over_with_as_many_bytes_is_an_error(store: Store, tmp_path: Path) -> None:
    """The time of writing shows it, also after the data set was pickled."""
    dataset = pickle.loads(pickle.dumps(ParquetDataset(store.url("table"))))
    assert rows(dataset) == list(range(900))
    path = tmp_path / "table" / "part-002.parquet"
    was = path.stat()
    os.utime(path, (was.st_atime, was.st_mtime + 0.2 - was.st_mtime % 1))  # within the same second nobody knows
    assert rows(dataset) == list(range(900))
    os.utime(path, (was.st_atime, was.st_mtime + 2))
    with pytest.raises(DataError, match=r"part-002\.parquet was written again since"):
        rows(dataset)


@pytest.mark.soak  # test_bounds.py has two such ranks by default
def test_ranks_read_their_shares_from_a_store(store: Store) -> None:
    def run(session: Session) -> list[int]:
        dataset = ParquetDataset(store.url("table"))
        found = [r for b in ParquetLoader(dataset, 50, shuffle=True, seed=1) for r in b["row"].tolist()]
        dataset.close()
        return found

    found = run_ranks(2, run)
    assert sorted(found[0] + found[1]) == list(range(900))
    assert len(found[0]) == len(found[1])


@pytest.mark.parametrize(
    "fault", [*(pytest.param(one, marks=pytest.mark.soak) for one in ("500", "slow")), "reset", "cut"]
)
def test_a_fault_that_passes_is_not_seen(store: Store, fault: str) -> None:
    dataset = ParquetDataset(store.url("table"))
    store.gets.clear()
    store.fault = lambda key, number: fault if number == 2 and "part-001" in key else None
    assert rows(dataset) == list(range(900))
    assert store.gets["table/part-001.parquet"] > 2


@pytest.mark.parametrize("fault", ["500", "reset", "cut"])
def test_a_fault_that_stays_names_the_file(store: Store, fault: str) -> None:
    dataset = ParquetDataset("bucket/table", filesystem=hasty(store))
    store.fault = lambda key, number: fault if "part-001" in key else None
    with pytest.raises(DataError, match=r"bucket/table/part-001.parquet.* cannot be (read|opened): .*AWS Error"):
        rows(dataset)


def test_no_rights_no_bucket_and_no_server_are_said(store: Store) -> None:
    home = hasty(store)
    with pytest.raises(DataError, match="bucket/nothing does not exist"):
        ParquetDataset("bucket/nothing", filesystem=home)
    store.is_open = False
    with pytest.raises(DataError, match=r"bucket/table cannot be reached: .*ACCESS_DENIED"):
        ParquetDataset("bucket/table", filesystem=home)
    other = Store(store.folder, port=1)
    with pytest.raises(DataError, match=r"bucket/table cannot be reached: .*AWS Error NETWORK_CONNECTION"):
        ParquetDataset("bucket/table", filesystem=hasty(other))
