"""Runs that are kept at a URL: the same files as in a folder, there while the run goes on, and never another's."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import PlanError
from lagom.result import Result
from lagom.watch import upload
from lagom.watch.run_dir import RunRecords, records
from lagom.watch.upload import Upload, is_url, on_disk


@pytest.fixture
def url() -> Iterator[str]:
    """Return the URL of a folder in fsspec's memory."""
    place = f"memory://lagom-{uuid.uuid4().hex}/runs"
    yield place
    system, path = fsspec.core.url_to_fs(place)
    if system.exists(path):
        system.rm(path, recursive=True)


def run(place: Any, fails: bool = False) -> Result:
    def train() -> float:
        model = nn.Linear(2, 1)
        for (x,) in DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=8):
            loss = model(x).mean()
            loss.backward()
            print("a batch")
        if fails:
            raise RuntimeError("in vain")
        return float(loss.detach())

    config = TorchDistributedConfig(world_size=2, launcher="local", run_dir=place, timeline=True)
    return experiment.lagom(train, config)


def there(url: str) -> dict[str, bytes]:
    """All files below a URL."""
    system, root = fsspec.core.url_to_fs(url)
    return {path[len(root) :].lstrip("/"): system.cat_file(path) for path in system.find(root)}


@pytest.mark.needs("observe")
def test_a_run_is_kept_at_a_url_as_it_is_in_a_folder(url: str, tmp_path: Path) -> None:
    result = run(url)
    assert result.run_url is not None
    assert result.run_url.startswith(url + "/")
    copy = result.run_dir
    assert copy is not None
    result.report()
    found = there(result.run_url)
    kept_here = {path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    # `.alive` is a lock file of this machine and is not uploaded.
    assert found == {name: data for name, data in kept_here.items() if name != ".alive"}
    kept = pickle.loads(pickle.dumps(result))
    assert (kept.run_url, kept.value) == (result.run_url, result.value)
    assert kept.report().exists()
    beside = run(tmp_path)
    assert beside.run_url is None
    beside.report()
    assert found.keys() == {
        path.relative_to(beside.run_dir).as_posix()  # type: ignore[arg-type]
        for path in tmp_path.glob("*/**/*")
        if path.is_file() and path.name != ".alive"
    }
    with pytest.raises(RuntimeError, match="in vain"):
        run(url, fails=True)
    names = {name.partition("/")[0] for name in there(url)}
    assert len(names) == 2
    assert there(result.run_url) == found
    del result
    gc.collect()
    assert not copy.exists()


def test_what_a_run_has_written_is_there_before_its_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = threading.Semaphore(0)
    original = Upload.send_changes

    def send(upload: Upload) -> None:
        original(upload)
        passes.release()

    monkeypatch.setattr(upload, "EVERY_S", 0.01)
    monkeypatch.setattr(Upload, "send_changes", send)
    kept = records(url, False, {"name": "x"})
    assert isinstance(kept, RunRecords)
    kept.wrote(3, b"hello")
    while passes.acquire(blocking=False):
        pass
    for _ in range(2):  # the first may have been under way
        assert passes.acquire(timeout=30)
    (name,) = (name for name in there(url) if name.endswith("rank-3.log"))
    assert there(url)[name] == b"hello"
    kept.close()


@pytest.mark.needs("observe")
@pytest.mark.parametrize("place", ["nosuch://bucket/runs", "https://127.0.0.1:9/runs"])
def test_a_url_that_takes_nothing_is_an_error_before_anything_starts(place: str) -> None:
    with pytest.raises(PlanError, match=rf"run_dir is '{place}', and nothing can be written there.*name another place"):
        run(place)
    assert not [thread for thread in threading.enumerate() if thread.name == "lagom-records"]


def test_what_cannot_be_copied_at_the_end_stays(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the folder that stays is removed with the test's
    kept = records(f"{url}?secret=hidden", False, {"name": "x"})
    assert kept is not None
    assert kept.upload is not None
    assert "hidden" not in kept.upload.url

    def full(*args: Any) -> None:
        raise OSError("quota exceeded")

    monkeypatch.setattr(kept.upload.file_system, "put_file", full)
    monkeypatch.setattr("lagom.watch.upload.time.sleep", lambda seconds: None)
    kept.ended({"outcome": "returned"})
    folder = kept.folder
    with caplog.at_level(logging.WARNING, "lagom"):
        kept.close()
    assert f"quota exceeded); it is in {folder} on this machine" in caplog.text
    del kept
    gc.collect()
    assert (folder / "result.json").exists()


def test_which_places_are_urls() -> None:
    for place in ("s3://bucket/runs", "memory://x", "hdfs:///runs", "abfss://c@a.dfs.core.windows.net/x", "dbfs:/runs"):
        assert is_url(place)
    for place in ("~/.lagom/runs", "/runs", "runs", "file:///runs", "C:x", "a b:/c"):
        assert not is_url(place)
    assert on_disk("file:///runs/x") == Path("/runs/x")
    assert on_disk("dbfs:/runs") == Path("/dbfs/runs")
