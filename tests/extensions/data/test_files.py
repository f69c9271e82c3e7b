"""``data.sources.files``: URLs reach the file system that they name, and what it says comes in words."""

from __future__ import annotations

from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import fs

from lagom.errors import DataError
from lagom.extensions.data.sources import files


def test_urls_of_stores_reach_their_file_systems_without_a_connection() -> None:
    found, path = files.file_system_of("gs://anonymous@bucket/table")
    assert isinstance(found, fs.GcsFileSystem)
    assert path == "bucket/table"
    azure, path = files.file_system_of("abfs://container@account.dfs.core.windows.net/table")
    assert azure.type_name == "abfs"
    assert path == "container/table"
    for scheme in ("s3", "s3a"):
        found, path = files.file_system_of(f"{scheme}://key:secret@bucket/table?region=eu-north-1")
        assert isinstance(found, fs.S3FileSystem)
        assert (path, found.region) == ("bucket/table", "eu-north-1")


def test_googles_store_is_not_tried_for_15_minutes() -> None:
    for url, seconds in (("gs://anonymous@b/t", 60), ("gs://anonymous@b/t?retry_limit_seconds=5", 5)):
        assert files.file_system_of(url) == fs.FileSystem.from_uri(f"gs://anonymous@b/t?retry_limit_seconds={seconds}")


def test_databricks_urls_are_folders_of_this_machine() -> None:
    assert files.file_system_of("dbfs:/b/t") == (fs.LocalFileSystem(), "/dbfs/b/t")


def test_what_pyarrow_does_not_know_goes_to_fsspec() -> None:
    found, path = files.file_system_of("memory://folder/table")
    assert isinstance(found.handler.fs, type(fsspec.filesystem("memory")))
    assert path.strip("/") == "folder/table"
    with pytest.raises(DataError, match=r"nobody://x cannot be opened: .*nobody"):
        files.locate(["nobody://x"])


def test_hdfs_without_hadoop_is_told_what_it_needs() -> None:
    with pytest.raises(DataError, match=r"hdfs://somewhere:1/table cannot be .*HADOOP_HOME"):
        files.locate(["hdfs://somewhere:1/table"])


def test_an_error_of_a_store_says_where_credentials_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(fs.FSSpecHandler):  # type: ignore[misc]
        def get_file_info(self, paths: list[str]) -> Any:
            raise pa.ArrowException("Unknown error: AuthenticationException")

    home = fs.PyFileSystem(Refusing(fsspec.filesystem("memory")))
    monkeypatch.setattr(files, "file_system_of", lambda *_: (home, "container/table"))
    with pytest.raises(DataError, match=r"abfss://x@y/t cannot be reached: .*AuthenticationException \(.*az login"):
        files.locate(["abfss://x@y/t"])
