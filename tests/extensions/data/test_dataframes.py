"""How long the files of DataFrames stay, without Spark; integration/test_frames.py has real frames."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver.attempts import run_attempts
from lagom.driver.protocol import Outcome
from lagom.extensions.data import dataframes
from lagom.extensions.data.dataframes import cache_folder, forget_frames, frames_of_run, write_frame
from lagom.on_rank.network_interfaces import addresses
from lagom.plan import plan
from lagom.program.signature import Call
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.wire.messages import RankReport
from tests.restart.added_snapshot import add_snapshot
from tests.spark.test_spark_session import Session


class DataFrame:
    """A frame that equals itself alone."""

    __module__ = "pyspark.sql.dataframe"
    schema = SimpleNamespace(jsonValue=lambda: {"fields": []})

    def __init__(self, folder: Path | None) -> None:
        settings = {"spark.master": "local[2]"} | ({} if folder is None else {dataframes.CACHE: f"file://{folder}"})
        conf = SimpleNamespace(get=lambda key, default: settings.get(key, default))
        self.sparkSession = SimpleNamespace(conf=conf, sparkContext=None)
        self.write = SimpleNamespace(option=lambda *_: SimpleNamespace(parquet=self._write))

    def inputFiles(self) -> list[str]:
        return []

    def sameSemantics(self, other: object) -> bool:
        return self is other

    def _write(self, url: str) -> None:
        os.makedirs(url.removeprefix("file://"))


@pytest.fixture(autouse=True)
def no_frame_is_left() -> Iterator[None]:
    with forget_frames():
        yield


def written(frame: DataFrame) -> dict[str, Any]:
    """The arguments of a call with ``frame``; the call lasts as long as they do."""
    return dict(write_frame({"train_set": frame, "hparams": {}}))


def path_of(provided: dict[str, Any]) -> Path:
    return Path(provided["train_set"].url.removeprefix("file://"))


def test_files_stay_while_a_call_uses_them(tmp_path: Path) -> None:
    frame = DataFrame(tmp_path)
    first, again = written(frame), written(frame)
    path = path_of(first)
    assert path_of(again) == path
    del first
    for _ in range(dataframes.MAX_KEPT_FRAMES + 1):
        written(DataFrame(tmp_path))
    assert path.exists()
    del again
    written(DataFrame(tmp_path))
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == dataframes.MAX_KEPT_FRAMES


class Launcher:
    """Runs an attempt that keeps a snapshot, and then ends with ``error``, if there is one."""

    def __init__(self, snapshots: SnapshotFolder | None, error: BaseException | None) -> None:
        self._snapshots, self._error = snapshots, error

    def run(self, *_: Any) -> list[Outcome]:
        if self._snapshots is not None:
            add_snapshot(self._snapshots, 1)
        if self._error is not None:
            raise self._error
        return [Outcome(rank=0, report=RankReport(rank=0, ok=True), load=dict)]


@pytest.mark.parametrize("has_folder", [True, False], ids=["a folder that is set", "a temporary folder"])
@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=["an error", "Ctrl-C"])
def test_files_of_a_run_that_can_be_resumed_stay_until_it_has_returned(
    error: BaseException, has_folder: bool, tmp_path: Path
) -> None:
    def run(
        provided: dict[str, Any], snapshots: SnapshotFolder | None, error: BaseException | None, *, is_kept: bool = True
    ) -> None:
        """Run once; afterwards the result is kept in place of the snapshots, if ``is_kept``."""
        launcher: Any = Launcher(snapshots, error)
        config = TorchDistributedConfig(world_size=1, run_dir=None)
        the_plan = plan(config, Cluster(launcher="spark", slots=1))
        with frames_of_run(provided, snapshots):
            run_attempts(launcher, the_plan, Call(function=lambda: None, provided=provided), snapshots=snapshots)
            if snapshots is not None and is_kept:
                snapshots.remove_all()

    folder = tmp_path / "frames" if has_folder else None
    lost, plain = written(DataFrame(folder)), written(DataFrame(folder))
    snapshots = SnapshotFolder(str(tmp_path / "snapshots"))
    snapshots.make()
    with forget_frames():  # which does the same as the end of the process
        for provided, kept in ((plain, None), (lost, snapshots)):
            with pytest.raises(type(error)):
                run(provided, kept, error)
    assert path_of(lost).exists()
    assert not path_of(plain).exists()
    run(lost, snapshots, None, is_kept=False)
    assert path_of(lost).exists()
    run(lost, snapshots, None)
    assert not path_of(lost).exists()
    if not has_folder:
        path_of(lost).parent.rmdir()


@pytest.mark.parametrize("host", ["localhost", "127.0.1.1", *addresses().values()])
def test_frames_of_a_connect_server_of_this_host_are_kept_on_its_disk(host: str) -> None:
    with forget_frames():
        assert str(cache_folder(Session(host, "local[2]"))).startswith("file:///")


@pytest.mark.parametrize("host", ["192.0.2.7", None])
def test_a_connect_server_elsewhere_does_not_see_a_folder_of_this_machine(host: str | None) -> None:
    assert cache_folder(Session(host, "local[2]")) is None
