"""Files of a run that begins again: those that an uninterrupted run leaves; and programs with checkpoints go on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from lagom.result import Result
from tests.disk.test_rank_disks import tree
from tests.driver import losses
from tests.driver.file_programs import from_checkpoint, from_scratch, from_scratch_seeded, with_events
from tests.driver.forked_server import forked_server


def run(function: Any, runs: Path, world_size: int = 2, **settings: Any) -> Result:
    config: dict[str, Any] = {"launcher": "local", "run_dir": runs, "seed": 3, **settings}
    return experiment.lagom(function, TorchDistributedConfig(world_size=world_size, **config))


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """Enter a folder with files that were there before."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    for log in ("steady.log", "rows.csv", "state.json", "whole.log"):
        Path(log).write_text("before\n")
    return folder


@pytest.mark.parametrize(
    ("world_size", "victim", "at"), [(2, 0, 1), pytest.param(2, 1, 2, marks=pytest.mark.soak), (1, 0, 1)]
)
def test_a_program_from_scratch_leaves_the_files_of_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, victim: int, at: int
) -> None:
    gate = str(tmp_path / "gate")
    wanted = ended(tmp_path, monkeypatch, "wanted")
    from_scratch_seeded(gate)
    found = ended(tmp_path, monkeypatch, "found")
    runs = tmp_path / "runs"
    with losses.killed([Path(f"{gate}-{at}")], losses.kill_rank(victim, runs)):
        result = run(lambda: from_scratch(gate), runs, world_size)
    assert result.value == "0,1,2"
    assert len(result.failures) == 1
    assert {name: data for name, data in tree(found).items() if name != "rows.db"} == {
        name: data for name, data in tree(wanted).items() if name != "rows.db"
    }


@pytest.mark.parametrize(
    ("world_size", "victim", "at", "first"),
    # Of one rank the test above shows that files are as before an attempt.
    [(2, 1, 3, 4), *(pytest.param(*other, marks=pytest.mark.soak) for other in ((2, 0, 2, 2), (1, 0, 2, 2)))],
)
def test_a_program_with_a_checkpoint_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, victim: int, at: int, first: int
) -> None:
    gate = str(tmp_path / "gate")
    wanted = ended(tmp_path, monkeypatch, "wanted")
    from_checkpoint(gate)
    found = ended(tmp_path, monkeypatch, "found")
    runs = tmp_path / "runs"
    with losses.killed([Path(f"{gate}-{at}")], losses.kill_rank(victim, runs)):
        result = run(lambda: from_checkpoint(gate), runs, world_size)
    assert result.value == first
    assert result.failures[0]["resumed_from"] == str(found / "last.pt")
    assert 0 < result.failures[0]["seconds_lost"] < 10
    assert torch.load("last.pt")["weights"].tolist() == [6.0, 6.0]
    (found / "last.pt").unlink()
    (wanted / "last.pt").unlink()
    # What followed the checkpoint is gone with the lost attempt, as the program does not write it again.
    rows = (wanted / "rows.csv").read_bytes()
    (wanted / "rows.csv").write_bytes(rows.replace(f"{first - 1},saved\r\n".encode(), b""))
    assert tree(found) == tree(wanted)


def test_events_of_tensorboard_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.tensorboard  # noqa: F401  (once, and not in each rank)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    gate, runs = str(tmp_path / "gate"), tmp_path / "runs"
    with forked_server(), losses.killed([Path(f"{gate}-2")], losses.kill_rank(0, runs)):
        run(lambda: with_events(gate), runs)
    steps: dict[str, list[int]] = {"loss": [], "after": []}
    for path in sorted(Path("events").iterdir()):
        assert path.name.startswith("events.out")
        events = EventAccumulator(str(path)).Reload()
        for name in set(events.Tags()["scalars"]) & set(steps):
            steps[name] += [event.step for event in events.Scalars(name)]
    assert sorted(steps["loss"]) == [0, 1, 2, 3]
    assert sorted(steps["after"]) == [0, 1, 3]


def test_a_file_that_was_being_written_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, runs = str(tmp_path / "gate"), tmp_path / "runs"

    def train() -> tuple[str, bool, list[str], list[str]]:
        with open("rows.csv", "a") as rows:
            rows.write("row\n")
        before = Path("state.txt").read_text()
        is_there = os.path.exists("new.txt")
        if before == "before":
            Path("state.txt").write_text("whole")
            with open("state.txt", "w") as file, open("new.txt", "w") as other:
                for half in (file, other):
                    half.write("ha")
                    half.flush()
                losses.pause_at(gate)
        return before, is_there, os.listdir(), [entry.name for entry in os.scandir(".")]

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("state.txt").write_text("before")
    with losses.killed([Path(gate)], losses.kill_rank(0, runs)):
        result = run(train, runs)
    names = ["rows.csv", "state.txt"]
    assert result.per_rank == (("whole", False, names, names),) * 2
    assert sorted(os.listdir()) == names


def test_files_of_the_last_attempt_stay_as_a_killed_process_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        with open("rows.csv", "a") as file:
            file.write("row\n")
        with open("state.txt", "w") as other:
            other.write("half")
            other.flush()
            os.kill(os.getpid(), 9)

    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("before\n")
    Path("state.txt").write_text("before\n")
    with pytest.raises(RankError, match="started 2 times"):
        run(train, tmp_path / "runs", 1, max_failures=1)
    assert Path("rows.csv").read_text() == "before\nrow\n"
    assert Path("state.txt").read_text() == "half"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "runs", "state.txt"]


def test_nothing_is_left_beside_the_files_of_a_program_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        file = open("state.txt", "w")  # noqa: SIM115
        file.write("half")
        file.flush()
        loss = torch.nn.Linear(2, 1)(torch.ones(4, 2)).sum()
        if lagom.rank() == 1:
            raise ValueError("of rank 1")
        for _ in range(5):
            loss.backward(retain_graph=True)

    monkeypatch.chdir(tmp_path)
    Path("state.txt").write_text("before\n")
    with pytest.raises(ValueError, match="of rank 1"):
        run(train, tmp_path / "runs")
    assert Path("state.txt").read_text() == "half"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "state.txt"]


@pytest.mark.soak
def test_a_run_that_is_lost_twice_goes_on_from_the_latest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = str(tmp_path / "gate")
    wanted = ended(tmp_path, monkeypatch, "wanted")
    from_checkpoint(gate)
    found = ended(tmp_path, monkeypatch, "found")
    runs = tmp_path / "runs"
    with losses.killed([Path(f"{gate}-{at}") for at in (1, 3)], losses.kill_rank(1, runs)):
        result = run(lambda: from_checkpoint(gate), runs)
    assert [failure["resumed_from"] for failure in result.failures] == [
        str(found / "last.pt"),
        str(found / "last.pt"),
    ]
    rows = (wanted / "rows.csv").read_bytes()
    (wanted / "rows.csv").write_bytes(rows.replace(b"1,saved\r\n", b"").replace(b"3,saved\r\n", b""))
    assert tree(found) == tree(wanted)


@pytest.mark.soak  # each rank imports MLflow anew
def test_the_lost_attempts_run_in_mlflow_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, runs = str(tmp_path / "gate"), tmp_path / "runs"

    def train() -> None:
        import mlflow

        mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
        with mlflow.start_run():
            mlflow.log_metric("loss", 1.0)
            losses.pause_at(gate)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with losses.killed([Path(gate)], losses.kill_rank(1, runs)):
        run(train, runs)
    metas = [path.read_text() for path in Path("mlruns").glob("*/*/meta.yaml")]
    assert sorted(re.findall(r"^status: (\d)", "\n".join(metas), flags=re.MULTILINE)) == [
        "3",
        "5",
    ]  # and not 1, RUNNING
