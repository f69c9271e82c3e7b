"""``lagom.restart.snapshot_copies``: snapshots of a run at a URL, whole or not at all, and of one process at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lagom.errors import LagomError
from lagom.restart import run_lease, snapshot_copies
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.restart.run_lease import RunLease
from lagom.restart.snapshot_copies import SnapshotCopies

URL = "memory://bucket/run"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Any:
    """fsspec's memory, and no time to wait."""
    monkeypatch.setattr(snapshot_copies, "EVERY_S", 0.02)
    monkeypatch.setattr(run_lease, "RENEWED_S", 0.02)
    monkeypatch.setattr(run_lease, "SETTLE_S", 0.0)
    return fsspec.filesystem("memory")


@pytest.fixture
def root() -> str:
    return f"/{uuid.uuid4().hex}"


@pytest.fixture
def folder(tmp_path: Path) -> SnapshotFolder:
    """The snapshots of a run on this machine."""
    made = SnapshotFolder(str(tmp_path / "snapshots"))
    made.make()
    for name in ("call", "settings"):
        (tmp_path / "snapshots" / name).write_text(name)
    return made


def add(folder: SnapshotFolder, number: int, state: str) -> None:
    """Add a snapshot, and remove those before the last two."""
    folder.add_message({"number": number})  # first: a snapshot may be copied as soon as it is complete
    Path(folder.partial(number)).write_text(state)
    folder.complete(number, described(state, float(number), number))


def described(state: str, at: float, number: int) -> dict[str, Any]:
    """The description of a snapshot with this state."""
    facts = {"bytes": len(state), "sha256": hashlib.sha256(state.encode()).hexdigest(), "lengths": {}}
    return facts | {"at": at, "place": [1, number]}


def there(system: Any, root: str) -> dict[str, str]:
    """The files at the URL."""
    names = (path.rpartition("/")[2] for path in system.find(f"{root}/snapshots"))
    return {name: system.cat_file(f"{root}/snapshots/{name}").decode() for name in names}


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_run_goes_on_from_the_copy_of_another_process(
    system: Any, root: str, folder: SnapshotFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SnapshotCopies(system, root, URL).going_on(folder, is_new=True):
        assert {"call", "settings", "driver.json"} <= there(system, root).keys()
        for number in (1, 2, 3):
            add(folder, number, f"state {number}")
        until(lambda: "snapshot-000003.json" in there(system, root))
        with (
            pytest.raises(LagomError, match=r"is going on in process \d+ on .*, or was lately.* call again in \d+ s"),
            SnapshotCopies(system, root, URL).going_on(SnapshotFolder(str(tmp_path / "x")), is_new=False),
        ):
            pass
        assert caplog.text == ""
    found = there(system, root)
    assert sorted(found) == ["call", "files.jsonl", "settings", "snapshot-000003.json", "snapshot-000003.state"]
    assert len(found["files.jsonl"].splitlines()) == 3
    mine = SnapshotFolder(str(tmp_path / "mine" / "snapshots"))
    copies = SnapshotCopies(system, root, URL)
    with copies.going_on(mine, is_new=False):
        copies.fetch_newest()
        newest = mine.newest()
        assert newest is not None
        assert Path(newest.path).read_text() == "state 3"
        assert [message["number"] for message in mine.messages(newest, print)] == [1, 2, 3]
        Path(mine.path, "result").write_text("the result")
    assert there(system, root) == {name: found[name] for name in ("call", "files.jsonl", "settings")} | {
        "result": "the result"
    }
    assert not [name for name in os.listdir(folder.path) if name.startswith(".sent")]


def test_there_is_always_a_whole_snapshot_however_slowly_they_are_copied(
    system: Any, root: str, folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, seen = system.put_file, list[int]()

    def put_slowly(path: str, to: str) -> None:
        if to.endswith(".state"):
            for number in range(3):  # each of which takes the place of the one before the last
                add(folder, last[0] + number + 1, "x" * 10)
            last[0] += 3
            seen.append(whole())
        put(path, to)

    def whole() -> int:
        files = there(system, root)
        descriptions = {
            name: json.loads(text) for name, text in files.items() if name.endswith("0.json") or name[-6:-5].isdigit()
        }
        return sum(len(files.get(name[:-4] + "state", "")) == one["bytes"] for name, one in descriptions.items())

    monkeypatch.setattr(system, "put_file", put_slowly)
    last = [1]
    add(folder, 1, "x" * 10)
    copies = SnapshotCopies(system, root, URL)
    with copies.going_on(folder, is_new=True):
        until(lambda: len(seen) > 3)
    assert all(seen[1:])
    assert whole() == 1


def test_a_snapshot_with_the_number_of_a_lost_attempt_takes_its_place_as_a_whole(
    system: Any, root: str, folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = SnapshotCopies(system, root, URL)
    with copies.going_on(folder, is_new=True):
        add(folder, 1, "first")
        until(lambda: "snapshot-000001.json" in there(system, root))
        folder.remove_all()
        put, without = system.put_file, []

        def put_file(path: str, to: str) -> None:
            if to.endswith(".state"):
                without.append("snapshot-000001.json" not in there(system, root))
            put(path, to)

        monkeypatch.setattr(system, "put_file", put_file)
        Path(folder.partial(1)).write_text("other")
        folder.complete(1, described("other", 7.0, 1))
        until(lambda: there(system, root).get("snapshot-000001.state") == "other")
    assert without == [True]
    assert json.loads(there(system, root)["snapshot-000001.json"])["at"] == 7.0


def test_what_goes_wrong_at_the_url_is_said_once_and_ends_nothing(
    system: Any, root: str, folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str, *to: str) -> None:
        raise PermissionError(f"no right to {path}")

    with caplog.at_level(logging.WARNING, "lagom"):
        with SnapshotCopies(system, root, URL).going_on(folder, is_new=True):
            add(folder, 1, "state")
            until(lambda: "snapshot-000001.json" in there(system, root))
            monkeypatch.setattr(system, "rm_file", refuse)
            for number in (2, 3):
                add(folder, number, "state")
                until(lambda number=number: f"snapshot-00000{number}.json" in there(system, root))
        assert [record.message.partition(":")[0] for record in caplog.records] == ["older snapshots at memory"]
        monkeypatch.undo()
        Path(folder.path, "call").unlink()  # as what cleans /tmp does: the copy stays
        assert "call" in there(system, root)


def test_a_lease_that_another_process_has_taken_ends_the_copies(
    system: Any, root: str, folder: SnapshotFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with SnapshotCopies(system, root, URL).going_on(folder, is_new=True), caplog.at_level(logging.WARNING, "lagom"):
        system.pipe_file(f"{root}/snapshots/driver.json", json.dumps({"id": "other", "until": 1e12}).encode())
        until(lambda: "another process goes on with the run" in caplog.text)
        add(folder, 1, "state")
        time.sleep(0.1)
    assert json.loads(there(system, root)["driver.json"])["id"] == "other"
    assert "snapshot-000001.json" not in there(system, root)


def test_a_lease_ends_with_its_process_or_some_time_after_its_last_sign(system: Any, root: str) -> None:
    def held(**changes: Any) -> bool:
        lease = RunLease(system, f"{root}/driver.json", URL)
        lease.take()
        sign = json.loads(system.cat_file(f"{root}/driver.json")) | {"id": "of another process"} | changes
        lease.release()
        system.pipe_file(f"{root}/driver.json", json.dumps(sign).encode())
        another = RunLease(system, f"{root}/driver.json", URL)
        try:
            another.take()
        except LagomError:
            system.rm_file(f"{root}/driver.json")
            return True
        another.release()
        return False

    assert held()
    assert held(pid=2**22 + 1, on="another machine")
    assert not held(pid=2**22 + 1)
    assert not held(until=time.time() - 1)
