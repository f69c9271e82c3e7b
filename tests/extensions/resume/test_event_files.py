"""TensorBoard's writers go on: the events of a run that is killed are those of one that is not, each in one file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from tests.extensions.resume import recorders
from tests.extensions.resume.kills import kill_driver, killed, wait_until_late
from tests.extensions.resume.recorders import on_board
from tests.extensions.resume.training import config

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")


def events(folder: Path) -> dict[str, list[bytes]]:
    """Return the events of each folder below ``folder``, without their times; each has one file."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[bytes]] = {}
    for path in folder.rglob("*tfevents*"):
        name = str(path.parent.relative_to(folder))
        assert name not in found, "it has two files"
        found[name] = []
        for event in LegacyEventFileLoader(str(path)).Load():
            event.wall_time = 0.0
            found[name].append(event.SerializeToString(deterministic=True))
    return found


def places(events_of: dict[str, list[bytes]]) -> dict[str, list[Any]]:
    """Return steps and tags of events, which are equal for all numbers of ranks."""
    from tensorboard.compat.proto.event_pb2 import Event

    parsed = {name: [Event.FromString(one) for one in found] for name, found in events_of.items()}
    return {name: [(one.step, [v.tag for v in one.summary.value]) for one in found] for name, found in parsed.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """The events of a run that is not killed."""
    folder = tmp_path_factory.mktemp("whole")
    experiment.lagom(on_board, config(folder, world_size=2))
    found = events(folder)
    assert sorted(found)[:4] == ["board", "board/best", "board/both_a", "board/both_b"]
    assert len(found["board"]) > 30
    return found


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_events_go_on_in_their_file_when_a_rank_is_killed(rank: int, whole: Any, tmp_path: Path) -> None:
    (tmp_path / "slowly").touch()
    with killed(tmp_path, rank, wait_until_late):
        result = experiment.lagom(on_board, config(tmp_path, world_size=2, snapshot_every_s=0.1))
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    assert events(tmp_path) == whole


@pytest.mark.soak  # the test above does so with two ranks
@pytest.mark.parametrize("world_size", [1, 3])
def test_events_of_any_number_of_ranks_go_on(world_size: int, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    experiment.lagom(on_board, config(tmp_path / "whole", world_size=world_size))
    (tmp_path / "killed" / "slowly").touch()
    with killed(tmp_path / "killed", world_size - 1, wait_until_late):
        result = experiment.lagom(on_board, config(tmp_path / "killed", world_size=world_size, snapshot_every_s=0.1))
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    assert events(tmp_path / "killed") == events(tmp_path / "whole")


@pytest.mark.soak  # test_resume.py goes on in another process by default, and the test above with the events
@pytest.mark.parametrize("world_size", [2, 3])
def test_events_go_on_in_another_process(world_size: int, whole: Any, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    kill_driver([sys.executable, recorders.__file__, str(tmp_path), "on_board"], tmp_path, env, wait_until_late)
    (run,) = (tmp_path / "runs").iterdir()
    experiment.resume(run, world_size=world_size)
    found = events(tmp_path)
    assert found == whole if world_size == 2 else places(found) == places(whole)
