"""``lagom.extensions.resume.snapshot_files``: snapshots of a host that does not see the run's folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lagom.cluster import Cluster, this_host
from lagom.config import TorchDistributedConfig
from lagom.driver.local import spec_of
from lagom.errors import LagomError, SnapshotError
from lagom.extensions.resume.snapshot_files import SnapshotFiles
from lagom.plan import plan
from lagom.program.payload import Parcel
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import Snapshot, SnapshotFolder, SnapshotPlace
from lagom.restart.written_files import AppendedFile, WrittenFiles
from lagom.wire.client import dial
from lagom.wire.messages import DeliverHello
from lagom.wire.server import DriverServer
from lagom.wire.spec import RunSpec

FACTS = {"at": 1.0, "place": [1, 2], "lengths": {}, "world_size": 2}
UNSEEN = SnapshotPlace(SnapshotFolder("/nowhere/snapshots"))


def spec(**more: Any) -> RunSpec:
    """The description of a run."""
    made = plan(TorchDistributedConfig(), Cluster(launcher="spark", slots=2))
    return dataclasses.replace(spec_of(made, 0), **more)


def files(place: SnapshotPlace, folder: Path, **more: Any) -> SnapshotFiles:
    return SnapshotFiles(place, spec(**more), str(folder), 0)


def test_a_state_comes_to_the_driver_and_is_a_snapshot_if_its_bytes_are_those_sent(tmp_path: Path) -> None:
    folder = SnapshotFolder(str(tmp_path / "snapshots"))
    folder.make()
    history = RunHistory(snapshots=folder)
    facts = FACTS | {"lengths": {f"/a/file/with/a/long/name/{i}": i for i in range(20_000)}}
    with DriverServer(lambda *_: None, lambda _: None, snapshots=folder) as channel:
        address = channel.listen("127.0.0.1")
        ours = files(UNSEEN, tmp_path, address=address, secret=channel.secret)
        for number in (1, 2):
            told = ours.write(number, Parcel([number, b"state"]), facts)
            assert len(json.dumps(told)) < 1000
            came = [channel.digests.pop(name) for name in (f"snapshot-{number}", f"snapshot-{number}.json")]
            assert came == told["sha256"]
            why = history.keep(number, told["sha256"], is_whole=number == 1)
            assert why == ("" if number == 1 else "other bytes came to the driver than were sent")
        assert not channel.delivered
    newest = folder.newest()
    assert newest is not None
    assert (newest.number, newest.facts["bytes"], newest.facts["lengths"]) == (1, told["bytes"], facts["lengths"])
    assert newest.facts["sha256"] == hashlib.sha256(Path(newest.path).read_bytes()).hexdigest()
    assert Path(newest.path).read_bytes() == Parcel([1, b"state"]).tobytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "files.jsonl",
        "snapshot-000001.json",
        "snapshot-000001.state",
        "snapshots",
    ]
    with pytest.raises(LagomError, match="the driver does not take it"):
        ours.write(3, Parcel(3), FACTS)


def test_a_run_whose_folder_was_removed_begins_again_from_the_beginning(tmp_path: Path) -> None:
    folder = SnapshotFolder(str(tmp_path / "snapshots"))
    folder.make()
    history = RunHistory(snapshots=folder)
    shutil.rmtree(folder.path)
    history.prepare()
    assert history.snapshots is not None
    assert history.snapshots.resumed is None


def test_what_comes_in_part_or_cannot_be_put_in_its_place_is_no_snapshot(tmp_path: Path) -> None:
    folder = SnapshotFolder(str(tmp_path / "snapshots"))
    folder.make()
    history = RunHistory(snapshots=folder)
    with DriverServer(lambda *_: None, lambda _: None, snapshots=folder) as channel:
        hello = DeliverHello(name="snapshot-1", size=100)
        link = dial(channel.listen("127.0.0.1"), channel.secret, hello, 10.0)
        assert link is not None
        link.socket.send(b"a part")
        while not os.path.exists(folder.partial(1)):
            time.sleep(0.01)
        link.close()
        while os.path.exists(folder.partial(1)):
            time.sleep(0.01)
    assert "No such file" in history.keep(1, ["", ""], is_whole=True)
    assert os.listdir(folder.path) == []


def test_a_host_that_can_neither_see_the_folder_nor_reach_the_driver_says_so(tmp_path: Path) -> None:
    assert files(UNSEEN, tmp_path, address=("127.0.0.1", 1)).obstacle(1) == ""
    assert "which holds rank 1, cannot read and write /nowhere/snapshots; set run_dir" in files(
        UNSEEN, tmp_path
    ).obstacle(1)


def test_a_run_does_not_go_on_without_what_it_has_written_on_another_host(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("log.txt", "best.pt", "old.txt")]
    snapshot = Snapshot(str(tmp_path), 1, FACTS | {"lengths": {paths[0]: 5}})

    def check(written: WrittenFiles) -> None:
        files(SnapshotPlace(UNSEEN.folder, snapshot), tmp_path, files=written).check_written()

    written = WrittenFiles()
    written.appended = {paths[0]: AppendedFile(0, host=this_host()), paths[2]: AppendedFile(0, host="other")}
    check(written)
    written.appended[paths[0]].host = "other"
    with pytest.raises(
        SnapshotError, match=r"the program has written .*log\.txt on another host, whose disk .* does not"
    ):
        check(written)
    written.appended.clear()
    saved = {"identity": [1, 2, 3], "lengths": {}, "host": "other"}
    written.take({"what": "saved", "path": paths[1], **saved})
    with pytest.raises(SnapshotError, match=r"best\.pt"):
        check(written)
