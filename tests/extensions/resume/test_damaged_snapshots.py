"""Damaged snapshots: the run goes on from the one before and says so, or ends in one line; never with other numbers."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.errors import LagomError
from lagom.extensions.resume.kept_call import read_call, read_result
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.run_folder import RunFolder
from lagom.spark.spark import SparkPayload
from tests.damage import KINDS, damage
from tests.extensions.resume.kills import kill_driver, wait_for_snapshot
from tests.extensions.resume.rewritten import kept_call, rewrite_state
from tests.extensions.resume.training import config, short, train
from tests.restart.added_snapshot import add_snapshot

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")

FILES = ("snapshot-000002.state", "snapshot-000002.json", "call", "settings", "files.jsonl", "snapshot-000001.state")
FACTS: Mapping[str, Any] = {"place": [1, 2], "lengths": {}, "world_size": 1}


def add(folder: SnapshotFolder, number: int) -> None:
    add_snapshot(folder, number, random.Random(number).randbytes(5000), FACTS["place"], float(number))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose driver was killed after two snapshots."""
    run = experiment.lagom(short, config(tmp_path_factory.mktemp("kept"), world_size=1, snapshot_every_s=60)).run_dir
    assert run is not None
    shutil.copyfile(run / "snapshots" / "result", run / "result-of-the-run")
    (run / "snapshots" / "result").unlink()
    folder = SnapshotFolder(str(run / "snapshots"))
    for number in (1, 2):
        saved = {"what": "saved", "path": f"/a/file{number}", "host": "a", "identity": [1, 2, 3], "lengths": {}}
        folder.add_message({**saved, "at": 1.0})
        add(folder, number)
        folder.note_kept(number, "")
    return run


def try_damage(number: int, kept: Path, run: Path) -> str:
    """Damage one file, and return what a process says that goes on with the run."""
    chance, name = random.Random(number), FILES[number % len(FILES)]
    kind = KINDS[(number // len(FILES) + number) % len(KINDS)]
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(kept, run)
    path = run / "snapshots" / name
    before = path.read_bytes()
    damage(path, kind, chance)
    said: list[str] = []
    try:
        with read_call(RunFolder.open_own(run)) as (_, _, snapshots), snapshots.locked():
            history = RunHistory(snapshots=snapshots, say=said.append)
            with SparkPayload(kept_call(run), history) as payload:
                assert os.pread(payload.fd, 1 << 20, 0) == (kept / "snapshots" / "call").read_bytes()
    except LagomError as error:
        text = str(error)
    else:
        text = ""
    if text:
        assert name in ("call", "settings", "files.jsonl"), (name, kind, text)
        assert "\n" not in text
        return text
    assert history.resumed is not None
    state = Path(history.resumed.path).read_bytes()
    assert state == (kept / "snapshots" / Path(history.resumed.path).name).read_bytes()
    assert {key: history.resumed.facts[key] for key in FACTS} == FACTS
    is_same = path.is_file() and not path.is_symlink() and path.read_bytes() == before
    if name.startswith("snapshot-000002"):
        wanted = "is not there" if name.endswith("json") and kind == "missing" else "is damaged, and left out: "
        assert history.resumed.number == (2 if is_same else 1)
        assert is_same or (len(said) == 1 and f"snapshot 2 {wanted}" in said[0])
        return said[0] if said else ""
    assert history.resumed.number == 2
    if name == "files.jsonl" and not is_same and kind != "doubled":  # the same twice is the same
        assert len(said) == 1, (name, kind)
        assert "files that the program wrote shortly before the loss may stay" in said[0]
    assert is_same or name in ("files.jsonl", "snapshot-000001.state"), (name, kind)
    return ""


def test_a_damaged_snapshot_is_never_gone_on_from(kept: Path, tmp_path: Path) -> None:
    texts = [try_damage(number, kept, tmp_path / "run") for number in range(66)]
    assert sum("snapshot 2 is damaged" in text for text in texts) >= 15
    assert sum("call is damaged" in text for text in texts) >= 6
    assert sum("settings is damaged" in text for text in texts) >= 6
    assert sum("files.jsonl is damaged in line" in text for text in texts) >= 3


@pytest.mark.soak  # the same as above, 500 times
def test_many_damaged_snapshots_are_never_gone_on_from(kept: Path, tmp_path: Path) -> None:
    for number in range(66, 566):
        try_damage(number, kept, tmp_path / "run")


def test_where_all_snapshots_are_damaged_the_run_does_not_begin_again_by_itself(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "run")
    for number in (1, 2):
        damage(tmp_path / "run" / "snapshots" / f"snapshot-00000{number}.state", "bit", random.Random(number))
    with pytest.raises(LagomError, match=r"all snapshots in .*/run/snapshots are damaged, so the run cannot go on"):
        experiment.resume(tmp_path / "run")


@pytest.mark.parametrize("kind", ["bit", "cut", "empty", "garbage", "fifo"])
def test_a_damaged_result_is_an_error(kind: str, kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, run := tmp_path / "run")
    (run / "result-of-the-run").rename(run / "snapshots" / "result")
    folder = SnapshotFolder(str(run / "snapshots"))
    assert read_result(folder) is not None
    damage(run / "snapshots" / "result", kind, random.Random(1))
    with pytest.raises(LagomError, match=r"/result is damaged: "):
        experiment.resume(run)


def test_a_snapshot_that_was_exchanged_since_a_rank_told_of_it_is_left_out(kept: Path, tmp_path: Path) -> None:
    """Its digests are right, and yet it is not the one that the driver remembers."""
    shutil.copytree(kept, tmp_path / "run")
    folder, said = SnapshotFolder(str(tmp_path / "run" / "snapshots")), list[str]()
    history = RunHistory(snapshots=folder, say=said.append)
    add(folder, 3)
    path = tmp_path / "run" / "snapshots" / "snapshot-000003.state"
    history.note_kept(3, hashlib.sha256(path.with_suffix(".json").read_bytes()).hexdigest())
    history.prepare()
    assert history.resumed is not None
    assert history.resumed.number == 3
    rewrite_state(path, lambda state: b"other" + state[5:])
    history.prepare()
    assert history.resumed.number == 2
    assert said == ["snapshot 3 is damaged, and left out: its description is not the one that was written"]


def test_a_run_keeps_to_its_folder_when_another_takes_its_place(kept: Path, tmp_path: Path) -> None:
    """The driver sends the call with which the run began, and ranks on its host find the folder wherever it is."""
    shutil.copytree(kept, run := tmp_path / "run")
    with read_call(RunFolder.open_own(run)) as (_, call, snapshots):
        history = RunHistory(snapshots=snapshots)
        run.rename(tmp_path / "moved")
        shutil.copytree(kept, run)
        for name in ("call", "snapshot-000002.state"):
            (run / "snapshots" / name).write_bytes(b"of another user")
        with SparkPayload(call, history) as payload:
            assert os.pread(payload.fd, 1 << 20, 0) == (kept / "snapshots" / "call").read_bytes()
            assert payload.snapshot_fd is not None
            assert len(os.pread(payload.snapshot_fd, 1 << 20, 0)) == 5000
        history.prepare()
        assert history.resumed is not None
        place = history.snapshots
        assert place is not None
        child = os.fork()
        if child == 0:
            found = [place.folder.is_here(), os.pread(place.folder.open_state(2), 5, 0) != b"of an"]
            os._exit(0 if all(found) else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run whose driver was killed in its second epoch."""
    folder = tmp_path_factory.mktemp("lost")
    command = [sys.executable, "-m", "tests.extensions.resume.training", str(folder)]
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}

    def wait(at: Path) -> None:
        wait_for_snapshot(at)
        with suppress(StopIteration):
            while len(list(at.glob("runs/*/snapshots/*.json"))) < 2:
                time.sleep(0.01)

    kill_driver(command, folder, env, wait)
    return folder


@pytest.mark.soak  # above without ranks
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "missing"])
def test_ranks_go_on_from_the_snapshot_before_a_damaged_one(
    kind: str, lost: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = experiment.lagom(train, config(tmp_path, world_size=2)).value
    (run,) = (lost / "runs").iterdir()
    shutil.copytree(run, copy := tmp_path / "copy")
    shutil.copyfile(lost / "rows.csv", tmp_path / "rows-before.csv")
    newest = max((copy / "snapshots").glob("*.state"))
    damage(newest, kind, random.Random(kind))
    value = experiment.resume(copy).value
    assert f"snapshot {int(newest.stem[-6:])} is damaged, and left out: " in capfd.readouterr().err
    assert value["losses"] == whole["losses"]
    assert value["weights"] == whole["weights"]
    shutil.copyfile(tmp_path / "rows-before.csv", lost / "rows.csv")
