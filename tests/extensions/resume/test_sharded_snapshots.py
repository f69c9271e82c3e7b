"""Runs with ZeRO go on from snapshots to which each rank has written its shards, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom import experiment
from lagom.extensions.resume.program_state import ProgramInProgress
from lagom.extensions.resume.rank_snapshots import follow_loaders
from lagom.extensions.resume.shard_files import ShardFiles, shard_parcel
from lagom.on_rank.process_settings import library_settings, set_process_settings
from lagom.program.signature import Call
from lagom.program.sources import source_files
from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.extensions.resume.kills import PATIENCE_S, killed
from tests.extensions.resume.sharded_training import DATA, WIDTH, config, train
from tests.ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
Settings = tuple[str, str, bool]
"""Name of the optimizer, type of numbers, and whether gradients are accumulated; arguments of the program."""


class Points:
    """Takes a snapshot at some batches of a program, as ``ShardedSnapshots`` does, but in memory."""

    def __init__(self, session: Session, settings: Settings, every: int) -> None:
        self.session, self.every, self.number = session, every, -1
        self.program = ProgramInProgress(session, {}, (library_settings, set_process_settings))
        self.call = partial(train, DATA, "/nowhere", *settings)
        self.program.prepare(Call(function=train, provided={}, sources=source_files(train)), {})
        self.pickles: list[tuple[bytes, list[bytes]]] = []
        self.parts: list[bytes] = []
        self.versions: list[str] = []

    def point(self, iterator: Any) -> None:
        self.number += 1
        shards = self.session.resumption.shards
        if self.number % self.every or shards is None:
            return
        part = shards.collect()
        self.parts.append(shard_parcel(part).tobytes())
        self.versions.append(part.version)
        if self.session.rank == 0:
            pickled, buffers = self.program.pickle(self.program.frames(sys._getframe(1)), iterator)
            self.pickles.append((pickled, [bytes(one) for one in buffers]))


Snapshot = tuple[tuple[bytes, list[bytes]], list[bytes]]
"""What rank 0 has pickled, and the shards of all ranks."""


def run_whole(session: Session, settings: Settings, every: int) -> Any:
    points: Any = Points(session, settings, every)
    follow_loaders(session, points)
    seed_everything(7)
    with points.program.installed():
        value = points.program.run(points.call)
    return value, points.pickles, points.parts, points.versions


def run_plain(_: Session, settings: Settings) -> Any:
    seed_everything(7)
    return train(DATA, "/nowhere", *settings)


def run_rest(session: Session, settings: Settings, snapshot: Snapshot, again: bool = False) -> Any:
    """Go on from ``snapshot``; with ``again``, return the first snapshot that is taken then."""
    (pickled, buffers), parts = snapshot
    session.resumption.parts = ShardFiles([kept_file(part) for part in parts])
    points: Any = Points(session, settings, 1 if again else 10**6)
    follow_loaders(session, points)
    seed_everything(99)
    with points.program.installed():
        rest = points.program.restore(pickled, [bytearray(one) for one in buffers])
        value = points.program.run(rest)
    return (points.pickles[:1], points.parts[0]) if again else value


def kept_file(part: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(part)
        file.flush()
        return os.dup(file.fileno())


def take(world_size: int, level: int, settings: Settings, every: int) -> tuple[Any, list[Snapshot]]:
    """The value of the program on ranks, and its snapshots."""
    run = partial(run_whole, settings=settings, every=every)
    rows = run_ranks(world_size, run, batches="whole", zero_lvl=level)
    assert len({str(row[3]) for row in rows}) == 1, "the ranks' shards belong to other steps"
    value, pickles, *_ = rows[0]
    return value, [(pickled, [row[2][i] for row in rows]) for i, pickled in enumerate(pickles)]


def go_on(world_size: int, level: int, settings: Settings, snapshot: Snapshot, **more: Any) -> list[Any]:
    run = partial(run_rest, settings=settings, snapshot=snapshot, **more)
    return run_ranks(world_size, run, batches="whole", zero_lvl=level)


def is_close(value: Any, wanted: Any) -> bool:
    def flat(one: Any) -> torch.Tensor:
        numbers = [
            torch.tensor(each).reshape(-1) for each in [*one["weights"], *one["moments"].values(), one["losses"]]
        ]
        return torch.cat(numbers)

    return torch.allclose(flat(value), flat(wanted), rtol=0, atol=1e-9) and value["random"] == wanted["random"]


LEVELS = (1, 2, 3)
BY_DEFAULT = (1, "adamw", 2, 3), (2, "sgd", 3, 2), (3, "adamw", 3, 1)
"""Level, optimizer, and numbers of ranks before and after."""


@pytest.mark.parametrize(
    ("level", "world_size"),
    [
        *((1, 2), (2, 2), (3, 3)),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in [(1, 3), (2, 3), (3, 2)]),
    ],
)
def test_a_sharded_run_goes_on_with_the_same_bits(level: int, world_size: int) -> None:
    """Gradients of an earlier batch are there at the snapshot, and the second optimizer does not step any more."""
    settings = ("adamw", "float32", level == 2)
    value, snapshots = take(world_size, level, settings, every=13)
    assert go_on(world_size, level, settings, snapshots[1]) == [value] * world_size


@pytest.mark.parametrize(
    ("level", "name", "before", "after"),
    [
        *BY_DEFAULT,
        *(
            pytest.param(level, name, before, after, marks=pytest.mark.soak)
            for level in LEVELS
            for name in ("sgd", "adamw")
            for before, after in ((2, 3), (3, 2), (2, 1), (3, 1))
            if (level, name, before, after) not in BY_DEFAULT
        ),
    ],
)
def test_any_number_of_ranks_goes_on_with_the_numbers_of_one_process(
    level: int, name: str, before: int, after: int
) -> None:
    settings = (name, "float64", False)
    _, snapshots = take(before, level, settings, every=13)
    wanted = run_ranks(1, partial(run_plain, settings=settings), patches=False)[0]
    for value in go_on(after, level, settings, snapshots[1]):
        assert is_close(value, wanted)


@pytest.mark.parametrize(
    ("level", "name"),
    [
        (2, "adafactor"),  # by whole parameters
        (3, "lbfgs"),  # not sharded, but its parameters are
        *(pytest.param(level, "lbfgs", marks=pytest.mark.soak) for level in LEVELS[:2]),
        pytest.param(1, "adafactor", marks=pytest.mark.soak),
    ],
)
def test_optimizers_that_are_not_cut_by_element_go_on_with_the_same_bits(level: int, name: str) -> None:
    settings = (name, "float32", False)
    value, snapshots = take(2, level, settings, every=13)
    assert go_on(2, level, settings, snapshots[1]) == [value] * 2


@pytest.mark.parametrize(
    ("level", "after"), [(3, 3), *(pytest.param(level, 2, marks=pytest.mark.soak) for level in LEVELS)]
)
def test_a_snapshot_before_the_first_step_after_another_is_as_good(level: int, after: int) -> None:
    """Other ranks take it than have taken the first; the state of optimizers is still in the files of the first."""
    settings = ("adamw", "float64", False)
    value, snapshots = take(2, level, settings, every=13)
    rows = go_on(after, level, settings, snapshots[1], again=True)
    again = rows[0][0][0], [row[1] for row in rows]
    for found in go_on(2, level, settings, again):
        assert is_close(found, value)


def test_ranks_write_only_their_parts() -> None:
    """Each byte of the state of Adam and of parameters is in one file, and no rank has more than its part."""
    settings = ("adamw", "float32", False)
    _, snapshots = take(2, 3, settings, every=13)
    (_, buffers), parts = snapshots[1]
    num_bytes = 4 * WIDTH * WIDTH
    assert sum(map(len, buffers)) < num_bytes, "rank 0 has pickled a parameter that is sharded"
    for part in parts:  # a parameter, its gradient and two moments, and as many bytes again for all that is small
        assert 4 * num_bytes / 2 < len(part) < 8 * num_bytes / 2


def test_a_file_that_lacks_a_part_is_an_error() -> None:
    _, snapshots = take(2, 1, ("sgd", "float32", False), every=13)
    pickled, parts = snapshots[1]
    with pytest.raises(RankFailedError, match=r"no rank has kept bytes \d+ to \d+ of"):
        go_on(2, 1, ("sgd", "float32", False), (pickled, parts[:1]))


@pytest.mark.parametrize(
    ("level", "world_size", "rank"),
    [
        (3, 2, 1),
        *(
            pytest.param(*other, marks=pytest.mark.soak)
            for other in [(1, 2, 1), (1, 3, 2), (2, 2, 1), (2, 3, 0), (3, 3, 2)]
        ),
    ],
)
def test_a_sharded_run_whose_rank_is_killed_goes_on(level: int, world_size: int, rank: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"world_size": world_size, "zero_lvl": level}
    wanted = experiment.lagom(train, config(tmp_path / "whole", **settings)).value
    folder = tmp_path / "lost"
    folder.mkdir()
    (folder / "slowly").touch()
    with killed(folder, rank):
        result = experiment.lagom(train, config(folder, snapshot_every_s=0.1, **settings))
    assert result.value == wanted
    assert "of epoch 2" in result.failures[0]["resumed_from"]


@contextmanager
def first_fork_killed(folder: Path, rank: int) -> Iterator[list[int]]:
    """Kill the first fork of ``rank`` of the run in ``folder`` as soon as there is one; yield a list that gets it."""
    killed_forks: list[int] = []

    def kill() -> None:
        end = time.monotonic() + PATIENCE_S
        children: Path | None = None
        while time.monotonic() < end and not killed_forks:
            if children is None:
                for path in folder.glob("runs/*/run.json"):
                    process = json.loads(path.read_text())["ranks"].get(str(rank), {})
                    if pid := process.get("pid"):
                        children = Path(f"/proc/{pid}/task/{pid}/children")
                continue
            with suppress(OSError):
                for fork in map(int, children.read_text().split()):
                    os.kill(fork, signal.SIGKILL)
                    killed_forks.append(fork)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed_forks
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_snapshots_go_on_when_the_process_that_writes_shards_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    (folder / "slowly").touch()
    settings: dict[str, Any] = {"world_size": 2, "zero_lvl": 1, "snapshot_every_s": 0.1}
    with first_fork_killed(folder, 1) as forks, killed(folder, 0):
        result = experiment.lagom(train, config(folder, **settings))
    assert len(forks) == 1
    assert "of epoch 2" in result.failures[0]["resumed_from"]
