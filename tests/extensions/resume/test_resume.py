"""Runs that are killed in their second epoch go on from a snapshot, and are as runs that were not killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.cli import main
from lagom.cluster import this_host
from lagom.driver.local import LocalLauncher
from lagom.errors import LagomError, PlanError
from lagom.extensions.resume.kept_call import read_call
from lagom.forward.rows.whole_reasons import WholeReason
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder, SnapshotPlace
from lagom.run_folder import RunFolder
from lagom.watch.run_dir import RunRecords
from tests.extensions.resume.kills import kill_driver, killed, wait_for_snapshot
from tests.extensions.resume.rewritten import kept_call, rewrite_call, rewrite_lines, rewrite_state
from tests.extensions.resume.training import config, short, train, train_as_on_a_gpu, train_by_rows

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the values have the same bits."""
    plain = all(bool(one[name] == other[name]) for name in ("losses", "weights", "python"))
    return plain and torch.equal(one["random"], other["random"])


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the weights are equal but for rounding."""
    pairs = zip(one["weights"], other["weights"], strict=True)
    return all(torch.allclose(torch.tensor(x), torch.tensor(y), rtol=0, atol=1e-12) for x, y in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The value of a run that is not killed, and the file that it writes."""
    folder = tmp_path_factory.mktemp("whole")
    value = experiment.lagom(train, config(folder, world_size=2)).value
    return value, (folder / "rows.csv").read_text()


def test_a_run_with_fewer_ranks_has_more_again_when_there_is_room(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It goes on with them from the first snapshot that is kept after this."""
    slowly, sizes = tmp_path / "slowly", list[int]()

    def slots_again(launcher: LocalLauncher, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        assert wait_s == 0.0
        sizes.append(1 if not sizes else wanted)  # after the loss, and for more ranks
        slowly.write_text("1.0")
        return sizes[-1]

    def begin_again(records: RunRecords, world_size: int) -> None:
        if world_size == 2:
            slowly.unlink()
        begin(records, world_size)

    begin = RunRecords.begin_again
    monkeypatch.setattr(RunRecords, "begin_again", begin_again)
    monkeypatch.setattr(LocalLauncher, "slots_again", slots_again)
    monkeypatch.setattr(LocalLauncher, "free_slots", lambda launcher, running, one_host: 3)
    slowly.touch()
    with killed(tmp_path, 1):
        settings = config(tmp_path, world_size=2, snapshot_every_s=0.1, timeline=True)
        result = experiment.lagom(train_as_on_a_gpu, settings)
    assert len(result.per_rank) == 2
    assert close(result.value, whole[0])
    assert (tmp_path / "rows.csv").read_text() == whole[1]
    shown = capfd.readouterr()
    assert [line.partition(":")[0] for line in shown.out.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
    goes_on = r"the run continues from batch \d+ of epoch 2"
    assert re.search(f"{goes_on}, attempt 2 of 4, with 1 rank instead of 2\n", shown.err)
    assert re.search(f"there is room for more ranks; {goes_on}, with 2 ranks\n", shown.err)
    models = "the snapshot: NVIDIA H200 (132 multiprocessors, driver 570.1); this run: the CPU"
    assert shown.err.count(f"GPUs differ in model, multiprocessors or driver ({models})") == 1
    (failure,) = result.failures
    assert failure["cause"].startswith("rank 1 was killed by SIGKILL")
    assert result.run_dir is not None
    record = json.loads((result.run_dir / "run.json").read_text())
    assert (record["world_size"], len(record["ranks"])) == (2, 2)
    timelines = sorted(path.name for path in result.run_dir.glob("timelines*"))
    assert timelines == ["timelines", "timelines-lost-1", "timelines-lost-2"]


# The test above kills rank 1 of such a run, tests/programs/test_kills.py rank 0 of a program, and
# test_another_process_goes_on has the bits of a run that is not killed.
@pytest.mark.soak
@pytest.mark.parametrize(("rank", "function"), [(0, train_as_on_a_gpu), (1, train)])
def test_a_run_goes_on_from_its_snapshot_when_a_rank_is_killed(
    rank: int, function: Any, whole: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slowly").touch()
    with killed(tmp_path, rank):
        result = experiment.lagom(function, config(tmp_path, world_size=2, snapshot_every_s=0.1))
    assert same(result.value, whole[0])
    assert (tmp_path / "rows.csv").read_text() == whole[1]
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("epoch")]
    assert shown == [f"epoch {number}: {loss:.12g}" for number, loss in enumerate(result.value["losses"])]
    assert result.run_dir is not None
    record = json.loads((result.run_dir / "run.json").read_text())
    assert record["snapshots"]["bytes"] > 0
    assert record.get("without_snapshots") is None


@pytest.mark.soak  # the tests above do so with two ranks
@pytest.mark.parametrize("world_size", [1, 3])
def test_any_number_of_ranks_goes_on_with_workers_of_loaders(world_size: int, tmp_path: Path) -> None:
    check_a_killed_run(train, world_size, tmp_path)


@pytest.mark.soak  # test_same_bits.py goes on with such models by default, and the test above after a kill
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_shared_out_by_rows_goes_on_with_the_same_bits(world_size: int, tmp_path: Path) -> None:
    check_a_killed_run(train_by_rows, world_size, tmp_path)


def check_a_killed_run(function: Any, world_size: int, tmp_path: Path) -> None:
    """Check that a run whose last rank is killed is as one that is not, to the bit."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    wanted = experiment.lagom(function, config(tmp_path / "whole", world_size=world_size))
    (tmp_path / "killed" / "slowly").touch()
    with killed(tmp_path / "killed", world_size - 1):
        result = experiment.lagom(function, config(tmp_path / "killed", world_size=world_size, snapshot_every_s=0.1))
    assert same(result.value, wanted.value)
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    rows, wanted_rows = ((tmp_path / name / "rows.csv").read_text() for name in ("killed", "whole"))
    assert rows == wanted_rows


@pytest.fixture
def lost_driver(killed_driver: Path) -> Path:
    """The folder of a run whose driver was killed, with the snapshots that it had then: each resumed run keeps more."""
    (run,) = (killed_driver / "runs").iterdir()
    shutil.rmtree(run / "snapshots")
    shutil.copytree(killed_driver / "kept", run / "snapshots")
    return killed_driver


@pytest.fixture(scope="module")
def killed_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    program = Path(__file__).parent / "training.py"
    env = os.environ | {"PYTHONPATH": str(program.parents[3])}
    kill_driver([sys.executable, str(program), str(folder)], folder, env)
    (run,) = (folder / "runs").iterdir()
    shutil.copytree(run / "snapshots", folder / "kept")
    return folder


@pytest.mark.parametrize(
    "world_size",
    # test_a_run_is_resumed_from_its_url goes on on one by default, and test_scripts.py on three.
    [None, *(pytest.param(number, marks=pytest.mark.soak) for number in (1, 3))],
)
def test_another_process_goes_on_with_a_run_whose_driver_was_killed(
    world_size: int | None, whole: Any, lost_driver: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    before = os.getcwd()
    result = experiment.resume(run, world_size=world_size)
    assert os.getcwd() == before
    assert result.run_dir == run
    assert (same if world_size is None else close)(result.value, whole[0])
    rows = [line.rpartition(",") for line in (lost_driver / "rows.csv").read_text().splitlines()]
    assert rows == [line.rpartition(",") for line in whole[1].splitlines()]
    shown = capfd.readouterr()
    assert "continues from batch" in shown.err
    assert [line.split(":")[0] for line in shown.out.splitlines() if line.startswith("epoch")] == ["epoch 1", "epoch 2"]
    again = experiment.resume(run)
    assert same(again.value, result.value)
    if world_size != 1:
        assert {one.reason for one in result.whole} == {WholeReason.CHANGES_NUMBERS}
    assert again.whole == result.whole
    assert again.speed == result.speed
    assert 0 < result.speed.steps < 100
    assert {part.name for part in result.speed.parts} >= {"loading", "optimizer", "own"}
    shown = capfd.readouterr()
    assert "had ended already" in shown.err
    assert shown.out == ""


def test_a_run_is_resumed_from_its_url(whole: Any, lost_driver: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    url = f"memory://{run.name}"
    system, root = fsspec.core.url_to_fs(url)
    system.put(f"{run}/", root, recursive=True)
    sign = {"id": "another", "host": "another", "pid": 1, "until": time.time() + 9}
    system.pipe_file(f"{root}/snapshots/driver.json", json.dumps(sign).encode())
    with pytest.raises(LagomError, match=r"is going on in process 1 on another, or .* is dead, call again in [89] s"):
        experiment.resume(url)
    system.rm_file(f"{root}/snapshots/driver.json")
    result = experiment.resume(url, world_size=1)
    assert close(result.value, whole[0])
    assert result.run_url == url
    assert "continues from batch" in capfd.readouterr().err
    names = {path[len(root) :].lstrip("/") for path in system.find(root)}
    assert names >= {"run.json", "result.json", "snapshots/result", "snapshots/call", "snapshots/settings"}
    assert not [name for name in names if name.startswith("snapshots/snapshot-") or name.endswith("driver.json")]
    assert main(["resume", url]) == 0
    shown = capfd.readouterr().err
    assert "had ended already" in shown
    assert f"experiment.resume('{url}').value" in shown
    with pytest.raises(ValueError, match="there is no run at memory://nowhere/run"):
        experiment.resume("memory://nowhere/run")
    system.rm(f"{root}/snapshots", recursive=True)
    with pytest.raises(LagomError, match=f"the run at {url} has kept no snapshots"):
        experiment.resume(url)


def test_a_run_whose_files_are_on_another_host_keeps_its_snapshots(lost_driver: Path) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    journal = run / "snapshots" / "files.jsonl"
    rewrite_lines(journal, this_host(), "another host")
    before = sorted((run / "snapshots").iterdir())
    with pytest.raises(LagomError, match=r"has written .*rows\.csv on another host, whose disk .* does not see"):
        experiment.resume(run)
    assert sorted((run / "snapshots").iterdir()) == before


@pytest.mark.soak  # above, and tests/restart/test_snapshot_copies.py shows by default what is copied meanwhile
def test_a_run_at_a_url_goes_on_after_its_driver_was_killed(whole: Any, tmp_path: Path) -> None:
    program = Path(__file__).parent / "training.py"
    env = os.environ | {"PYTHONPATH": str(program.parents[3])}
    url = f"local://{tmp_path}/runs"
    kill_driver([sys.executable, str(program), str(tmp_path), url], tmp_path, env)
    (run,) = (tmp_path / "runs").iterdir()
    result = experiment.resume(f"{url}/{run.name}")
    assert same(result.value, whole[0])
    assert result.run_url == f"{url}/{run.name}"
    rows = [line.rpartition(",") for line in (tmp_path / "rows.csv").read_text().splitlines()]
    assert rows == [line.rpartition(",") for line in whole[1].splitlines()]


@pytest.mark.soak
def test_the_command_line_goes_on_with_a_run_by_its_name(
    lost_driver: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    monkeypatch.setenv("LAGOM_RUN_DIR", str(run.parent))
    assert main(["resume", run.name[-6:], "-n", "1"]) == 0
    shown = capfd.readouterr()
    assert "epoch 2" in shown.out
    assert f"the run has ended. {run}/result.json has its result" in shown.err


def test_a_run_without_snapshots_is_not_resumed(tmp_path: Path) -> None:
    experiment.lagom(short, config(tmp_path, world_size=1))
    (run,) = (tmp_path / "runs").iterdir()
    with pytest.raises(LagomError, match="kept no snapshots"):
        experiment.resume(run)
    (run / "study.journal").touch()
    with pytest.raises(LagomError, match="is a search or an ablation study: call it again with resume="):
        experiment.resume(run)


def test_snapshots_that_others_can_write_are_not_read(tmp_path: Path) -> None:
    experiment.lagom(short, config(tmp_path, world_size=1, snapshot_every_s=60))
    (run,) = (tmp_path / "runs").iterdir()
    (run / "snapshots").chmod(0o777)
    with pytest.raises(LagomError, match="not this user's alone"):
        experiment.resume(run)


def test_a_run_that_cannot_keep_snapshots_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match="set run_dir"):
        experiment.lagom(short, config(tmp_path, world_size=1, snapshot_every_s=60, run_dir=None))
    result = experiment.lagom(short, config(tmp_path, world_size=2, snapshot_every_s=60, batches="split"))
    assert "no snapshots: ranks have states of their own" in capfd.readouterr().err
    assert result.value == 1
    assert result.run_dir is not None
    assert not (result.run_dir / "snapshots").exists()


def test_a_host_that_does_not_share_the_runs_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = SnapshotPlace(SnapshotFolder(str(tmp_path / "not here")))
    monkeypatch.setattr(RunHistory, "snapshots", property(lambda _: elsewhere))
    result = experiment.lagom(short, config(tmp_path, world_size=2, snapshot_every_s=60))
    assert result.value == 1
    wanted = f"{socket.gethostname()}, which holds rank 0, cannot read and write {elsewhere.folder.path}"
    assert wanted in capfd.readouterr().err
    assert result.run_dir is not None
    assert wanted in json.loads((result.run_dir / "run.json").read_text())["without_snapshots"]


def test_sigterm_has_no_snapshot_tried_where_none_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> int:
        for number, _ in enumerate(DataLoader(TensorDataset(torch.zeros(8, 1)))):
            if number == 0:
                os.kill(os.getppid(), signal.SIGTERM)  # the host process has the driver want a snapshot
            time.sleep(0.2)
        return 1

    elsewhere = SnapshotPlace(SnapshotFolder(str(tmp_path / "not here")))
    monkeypatch.setattr(RunHistory, "snapshots", property(lambda _: elsewhere))
    result = experiment.lagom(train, config(tmp_path, world_size=1, snapshot_every_s=0.1))
    assert result.value == 1
    assert result.run_dir is not None
    why = json.loads((result.run_dir / "run.json").read_text())["without_snapshots"]
    assert f"cannot read and write {elsewhere.folder.path}" in why
    assert "Error" not in capfd.readouterr().err


def spoil(folder: Path) -> None:
    """Have the snapshots of a run name a class that is not there."""
    for path in folder.glob("runs/*/snapshots/*.state"):
        rewrite_state(path, lambda state: state.replace(b"ProgramState", b"ProgramStale"))


def test_a_run_whose_snapshot_cannot_be_put_back_begins_again(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # As if ranks had written the snapshots so; else the driver, which knows their digests, leaves them out.
    monkeypatch.setattr(SnapshotFolder, "note_kept", lambda *_: None)

    def wait(folder: Path) -> None:
        wait_for_snapshot(folder)
        spoil(folder)

    (tmp_path / "slowly").touch()
    with killed(tmp_path, 1, wait):
        result = experiment.lagom(train, config(tmp_path, world_size=2, snapshot_every_s=2))
    assert "restarts from the beginning" in capfd.readouterr().err
    assert same(result.value, whole[0])
    assert (tmp_path / "rows.csv").read_text() == whole[1]


def test_a_snapshot_that_cannot_be_put_back_here_stays(lost_driver: Path) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    spoil(lost_driver)
    before = sorted((run / "snapshots").iterdir())
    with pytest.raises(LagomError, match="the snapshot cannot be put back: AttributeError"):
        experiment.resume(run)
    assert sorted((run / "snapshots").iterdir()) == before


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_kills_at_random_moments_change_nothing(seed: int, whole: Any, tmp_path: Path) -> None:
    moments, slowly = random.Random(seed), tmp_path / "slowly"
    slowly.touch()

    def kill() -> None:
        time.sleep(moments.uniform(2, 8))
        for _ in range(2):
            (path,) = tmp_path.glob("runs/*/run.json")
            rank = json.loads(path.read_text())["ranks"].get(str(moments.randrange(2)), {})
            if "pid" in rank:  # else the next attempt has not begun yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank["pid"], signal.SIGKILL)
            time.sleep(moments.uniform(2, 5))
        slowly.unlink()

    thread = threading.Thread(target=kill)
    thread.start()
    result = experiment.lagom(train, config(tmp_path, world_size=2, snapshot_every_s=0.2))
    thread.join()
    assert same(result.value, whole[0])
    assert (tmp_path / "rows.csv").read_text() == whole[1]
    assert result.failures


def test_a_run_that_still_goes_on_is_not_resumed(lost_driver: Path) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    before = (run / "run.json").read_text()
    with SnapshotFolder(str(run / "snapshots")).locked(), pytest.raises(LagomError, match="still going on"):
        experiment.resume(run)
    assert (run / "run.json").read_text() == before


def test_a_run_whose_functions_have_changed_is_not_resumed(lost_driver: Path, tmp_path: Path) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    call = kept_call(run)
    (name,) = (name for name in call.sources if name.endswith("training.py"))
    changed = call.sources[name].replace("total += loss.item()", "total += 2 * loss.item()")
    later = tmp_path / "imported_later.py"
    later.write_text("2")
    rewrite_call(run, dataclasses.replace(call, sources={**call.sources, name: changed, str(later): "1"}))
    with pytest.raises(LagomError, match=r"imported_later.py, epoch\(\) in .*training.py: not as when the run began"):
        experiment.resume(run)


def test_a_line_says_that_a_script_was_edited_whose_function_the_call_has_as_it_was(
    lost_driver: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run,) = (lost_driver / "runs").iterdir()
    call = kept_call(run)
    script = tmp_path / "script.py"
    text = "def train():\n    return 0.1\n"
    main_module: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, str(script), "exec"), main_module)
    call = dataclasses.replace(call, function=main_module["train"], provided={}, sources={str(script): text})
    rewrite_call(run, call)
    said = {}
    for now in (text, text.rstrip(), "LR = 1\n" + text, text.replace("0.1", "0.2"), "def train(:"):
        script.write_text(now)
        with read_call(RunFolder.open(run)):
            said[now] = "edited" in capfd.readouterr().err
    assert list(said.values()) == [False, False, True, True, True]


def test_after_ctrl_c_a_line_says_how_to_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def press() -> None:
        wait_for_snapshot(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "slowly").touch()
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        experiment.lagom(train, config(tmp_path, world_size=2, snapshot_every_s=0.1))
    thread.join()
    (run,) = (tmp_path / "runs").iterdir()
    assert re.search(rf"interrupted; lagom resume {run} continues from batch \d+ of epoch 2\n", capfd.readouterr().err)
