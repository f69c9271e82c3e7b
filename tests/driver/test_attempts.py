"""``lagom.driver.attempts``: a run that lost ranks restarts, and gives what it gives without a loss."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lagom import experiment
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver import local
from lagom.driver.attempts import LAST_S, REPLACED_S, run_attempts
from lagom.driver.protocol import Outcome
from lagom.driver.termination import softly_terminated
from lagom.errors import LagomError, PlanError, RankError, SnapshotError, StallError, Terminated
from lagom.plan import Plan, plan
from lagom.program.signature import Call
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.restart.losses import Loss
from lagom.result import Result
from lagom.wire.messages import RankReport
from tests.driver import losses
from tests.restart.added_snapshot import add_snapshot


def run(function: Any, tmp_path: Path, world_size: int = 2, **settings: Any) -> Result:
    config: dict[str, Any] = {"launcher": "local", "run_dir": tmp_path / "runs", "seed": 3, **settings}
    return experiment.lagom(function, TorchDistributedConfig(world_size=world_size, **config))


@pytest.fixture(scope="module")
def wanted() -> dict[int, dict[str, Tensor]]:
    """Return what uninterrupted runs return, by the number of ranks."""
    found = {}
    for world_size in (1, 2, 3):
        config = TorchDistributedConfig(world_size=world_size, launcher="local", run_dir=None, seed=3)
        found[world_size] = experiment.lagom(lambda: losses.train("none"), config).value
    return found


@pytest.mark.parametrize(
    ("world_size", "victim"),
    # test_attempt_files.py has one rank by default.
    [(2, 0), *(pytest.param(*other, marks=pytest.mark.soak) for other in ((2, 1), (3, 1), (1, 0)))],
)
def test_a_killed_rank_changes_neither_weights_nor_output(
    tmp_path: Path,
    wanted: dict[int, dict[str, Tensor]],
    world_size: int,
    victim: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate = tmp_path / "gate"
    with losses.killed([Path(f"{gate}-1")], losses.kill_rank(victim, tmp_path / "runs")):
        result = run(lambda: losses.train(str(gate)), tmp_path, world_size)
    assert losses.same(result.value, wanted[world_size])
    assert all(losses.same(one, result.value) for one in result.per_rank)
    shown = capfd.readouterr()
    assert [line.partition(":")[0] for line in shown.out.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
    assert f"rank {victim} was killed by SIGKILL" in shown.err
    assert "the run restarts, attempt 2 of 4" in shown.err
    assert result.run_dir is not None
    assert (result.run_dir / "rank-0.log").read_text().count("epoch") == 3
    (failure,) = result.failures
    assert failure.keys() == {"time", "rank", "host", "cause", "resumed_from", "seconds_lost"}
    assert (failure["rank"], failure["host"], failure["resumed_from"]) == (victim, os.uname().nodename, "the beginning")
    assert failure["seconds_lost"] > 0
    assert losses.record(tmp_path / "runs")["failures"] == result.failures
    assert {one["host"] for one in losses.ranks(tmp_path / "runs").values()} == {os.uname().nodename}


@pytest.mark.soak  # below, several attempts of a launcher of the test's are lost by default
def test_the_second_attempt_may_be_lost_too(tmp_path: Path, wanted: dict[int, dict[str, Tensor]]) -> None:
    gate = tmp_path / "gate"
    with losses.killed([Path(f"{gate}-1"), Path(f"{gate}-2")], losses.kill_rank(1, tmp_path / "runs")):
        result = run(lambda: losses.train(str(gate)), tmp_path)
    assert losses.same(result.value, wanted[2])
    assert len(result.failures) == 2


def test_the_callers_generators_go_on_from_the_attempt_that_succeeded(tmp_path: Path) -> None:
    def train() -> Tensor:
        first = torch.rand(2)
        losses.pause_at(str(tmp_path / "gate"))
        return first

    torch.manual_seed(5)
    with losses.killed([tmp_path / "gate"], losses.kill_rank(0, tmp_path / "runs")):
        found = run(train, tmp_path, seed=None).value, torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.stack(found), torch.rand(4).view(2, 2))


@pytest.mark.soak  # test_local.py shows it by default
def test_a_killed_fork_server_is_started_again(tmp_path: Path, wanted: dict[int, dict[str, Tensor]]) -> None:
    gate = tmp_path / "gate"
    with losses.killed([Path(f"{gate}-1")], lambda: os.kill(local.server().process.pid, signal.SIGKILL)):
        result = run(lambda: losses.train(str(gate)), tmp_path)
    assert losses.same(result.value, wanted[2])
    assert len(result.failures) == 1


def test_when_no_attempt_is_left_the_last_loss_is_the_error(tmp_path: Path) -> None:
    def die() -> None:
        with open(tmp_path / "attempts", "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    told = r"was killed by SIGKILL.* \(the run was started 2 times: max_failures=1\)"
    with pytest.raises(RankError, match=told):
        run(die, tmp_path, max_failures=1)
    assert [failure["resumed_from"] for failure in losses.record(tmp_path / "runs")["failures"]] == [
        "the beginning",
        None,
    ]
    with pytest.raises(RankError, match=r"was killed by SIGKILL") as caught:
        run(die, tmp_path, max_failures=0, run_dir=None)
    assert "started" not in str(caught.value)


class Refused(Exception):
    """An exception of the program."""


def raise_own() -> None:
    raise Refused


def divide() -> None:
    signal.raise_signal(signal.SIGFPE)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (raise_own, Refused),
        (lambda: sys.exit(3), RankError),
        (lambda: os._exit(4), RankError),
        (divide, RankError),
        pytest.param(lambda: losses.wait_for(lambda: False), StallError, marks=pytest.mark.soak),
    ],
    ids=["exception", "sys.exit", "os._exit", "a fault", "stall"],
)
def test_what_the_program_does_itself_is_tried_once(end: Any, error: type[Exception], tmp_path: Path) -> None:
    def train() -> None:
        print("begun")
        end()

    limits: dict[str, Any] = (
        {"stall_timeout_s": 0.5, "timeout_s": 1.0, "hb_interval": 0.2} if error is StallError else {}
    )
    with pytest.raises(error):
        run(train, tmp_path, **limits)
    assert losses.record(tmp_path / "runs")["failures"] == []


def test_ctrl_c_ends_the_second_attempt(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    Path(f"{gate}-2").touch()

    def press() -> None:
        losses.wait_for(Path(f"{gate}-2.reached").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with (
        losses.killed([Path(f"{gate}-1")], losses.kill_rank(1, tmp_path / "runs")),
        pytest.raises(KeyboardInterrupt),
    ):
        run(lambda: losses.train(str(gate)), tmp_path)
    thread.join()
    assert len(losses.record(tmp_path / "runs")["failures"]) == 1


class Shrinking:
    """A launcher whose runs lose a rank as long as it has another number of slots to give."""

    def __init__(self, *slots: int) -> None:
        self.slots = list(slots)
        self.sizes: list[int] = []
        self.waits: list[float] = []

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        self.waits.append(wait_s)
        return min(wanted, self.slots.pop(0))

    def run(self, plan: Plan, call: Call, records: Any, history: RunHistory) -> list[Outcome]:
        self.sizes.append(plan.world_size)
        if not self.slots:
            return [
                Outcome(rank=rank, report=RankReport(rank=rank, ok=True), load=dict) for rank in range(plan.world_size)
            ]
        history.loss = Loss(rank=1, host="there", cause="rank 1 was killed")
        raise RankError("rank 1 was killed", 1)


class Growing(Shrinking):
    """A launcher that has room for two of four ranks after a loss, and later for more.

    Args:
        ends: the ends of the attempts: a loss or an error.
    """

    def __init__(self, *ends: Loss | Exception) -> None:
        super().__init__()
        self.ends = list(ends)

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        return 2 if wait_s else wanted  # after a loss, and for more ranks

    def free_slots(self, running: int, *, one_host: bool) -> int:
        return 1

    def run(self, plan: Plan, call: Call, records: Any, history: RunHistory) -> list[Outcome]:
        self.sizes.append(plan.world_size)
        self.free = history.free_slots()
        if not self.ends:
            return [
                Outcome(rank=rank, report=RankReport(rank=rank, ok=True), load=dict) for rank in range(plan.world_size)
            ]
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        history.loss = end
        raise LagomError(end.cause)


LOST = Loss(rank=1, host="there", cause="rank 1 was killed")


def more_room(slots: int) -> Loss:
    """The end of an attempt for which there are ``slots`` more."""
    return Loss(rank=None, host="", cause="there is room for more ranks", free_slots=slots)


@pytest.mark.parametrize(
    ("ends", "sizes", "free"),
    [
        ([LOST], [4, 2], 1),
        ([LOST, more_room(1)], [4, 2, 3], 1),
        ([LOST, more_room(1), more_room(5)], [4, 2, 3, 4], 0),
        ([LOST, more_room(2), LOST], [4, 2, 4, 2], 1),
        ([LOST, more_room(2), SnapshotError("a file is on another host")], [4, 2, 4, 2], 0),
        ([LOST, more_room(2), PlanError("it has no torch")], [4, 2, 4, 2], 0),
        ([LOST, more_room(2), ModuleNotFoundError("no timm")], [4, 2, 4, 2], 0),
        ([LOST, LOST, LOST], [4, 2, 2, 2], 0),
    ],
    ids=[
        "a loss",
        "one more",
        "all again",
        "another loss",
        "no snapshot there",
        "no start there",
        "a package less",
        "the last attempt",
    ],
)
def test_a_run_takes_free_slots_that_it_can_use(ends: list[Any], sizes: list[int], free: int) -> None:
    launcher = Growing(*ends)
    assert attempts(launcher) == sizes
    assert launcher.free == free


GOING = Loss(rank=1, host="there", cause="Spark decommissions executor 1 on there", is_planned=True)


def test_an_executor_that_spark_decommissions_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = SnapshotFolder(str(tmp_path / "snapshots"))
    snapshots.make()
    add_snapshot(snapshots, 1, place=(2, 7))
    assert attempts(Growing(GOING, GOING), snapshots, max_failures=0) == [4, 4, 4]
    said = "Spark decommissions executor 1 on there; the run continues from batch 8 of epoch 2, elsewhere\n"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("slots", "has_room"), [(2, True), (1, False)])
def test_there_is_room_elsewhere_for_the_fewest_ranks_of_a_run(slots: int, has_room: bool) -> None:
    class Asked(Shrinking):
        def run(self, plan: Plan, call: Call, records: Any, history: RunHistory) -> list[Outcome]:
            self.has_room = history.has_room()
            return super().run(plan, call, records, history)

    launcher = Asked(slots)
    attempts(launcher, min_world_size=2, max_failures=0)
    assert launcher.has_room == has_room


def test_the_error_says_how_a_run_with_snapshots_goes_on(tmp_path: Path) -> None:
    snapshots = SnapshotFolder(str(tmp_path / "snapshots"))
    snapshots.make()
    add_snapshot(snapshots, 1, place=(2, 7))
    with pytest.raises(LagomError, match=f"max_failures=1.; lagom resume {tmp_path} continues from batch 8 of epoch 2"):
        attempts(Growing(LOST, LOST), snapshots, max_failures=1)


class Signalled(Growing):
    """A launcher whose process receives SIGTERM while an attempt ends, when no rank is left to be told."""

    def run(self, plan: Plan, call: Call, records: Any, history: RunHistory) -> list[Outcome]:
        history.leave = lambda: True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return super().run(plan, call, records, history)


def test_no_further_attempt_begins_after_sigterm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = SnapshotFolder(str(tmp_path / "snapshots"))
    snapshots.make()
    add_snapshot(snapshots, 1, place=(2, 7))
    launcher = Signalled(LOST)
    with pytest.raises(Terminated):
        attempts(launcher, snapshots)
    assert launcher.sizes == [4]
    assert f"ended by SIGTERM; lagom resume {tmp_path} continues from batch 8 of epoch 2" in capsys.readouterr().err


def test_an_error_of_the_program_ends_the_run_when_it_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Growing(LOST, more_room(2), ZeroDivisionError("first"), ZeroDivisionError("second"))
    with pytest.raises(ZeroDivisionError, match="second"):
        attempts(launcher)
    assert launcher.sizes == [4, 2, 4, 2]
    said = "with more ranks it failed: ZeroDivisionError: first; the run restarts, with the ranks that it had before"
    assert said in capsys.readouterr().err


def test_a_larger_attempt_that_has_kept_a_snapshot_ends_the_run_with_its_error(tmp_path: Path) -> None:
    snapshots = SnapshotFolder(str(tmp_path / "snapshots"))
    snapshots.make()

    class Keeping(Growing):
        def run(self, plan: Plan, call: Call, records: Any, history: RunHistory) -> list[Outcome]:
            number = len(self.sizes) + 1
            add_snapshot(snapshots, number, place=(1, number))
            return super().run(plan, call, records, history)

        def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
            return 2 if len(self.sizes) == 1 else wanted

    launcher = Keeping(LOST, more_room(2), StallError("it stalls", 0))
    with pytest.raises(StallError):
        attempts(launcher, snapshots)
    assert launcher.sizes == [4, 2, 4]


def attempts(launcher: Any, snapshots: SnapshotFolder | None = None, **settings: Any) -> list[int]:
    """Run on ``launcher``; return the numbers of ranks of all attempts."""
    already_distributed = settings.pop("already_distributed", False)
    config = TorchDistributedConfig(world_size=4, run_dir=None, **settings)
    the_plan = plan(config, Cluster(launcher="spark", slots=4), already_distributed=already_distributed)
    call = Call(function=lambda: None, provided={})
    with softly_terminated(the_plan) as termination:
        run_attempts(launcher, the_plan, call, snapshots=snapshots, termination=termination)
    sizes: list[int] = launcher.sizes
    return sizes


def test_an_attempt_takes_the_slots_that_are_there() -> None:
    assert attempts(Shrinking(3, 1, 8)) == [4, 3, 1, 4]
    assert attempts(Shrinking(2), min_world_size=2) == [4, 2]
    assert attempts(Shrinking(3), batches="per_rank", min_world_size=3) == [4, 3]


@pytest.mark.parametrize("settings", [{}, {"lr_scaling": "linear"}, {"min_world_size": 2}])
def test_a_run_without_slots_waits_for_new_ones(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Shrinking(0, 1, 4)
    assert attempts(launcher, **settings) == [4, 4]
    assert launcher.waits == [REPLACED_S, LAST_S, REPLACED_S]
    assert "rank 1 was killed; too few executors are left: waiting for others, 90 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("slots", "settings", "told"),
    [
        (2, {"min_world_size": 3}, "room for 2 of its 4 ranks: min_world_size=3"),
        (3, {"batches": "per_rank"}, "the global batch would change; set min_world_size"),
        (3, {"lr_scaling": "linear"}, "the global batch would change; set min_world_size"),
        (3, {"already_distributed": True}, "the global batch would change; set min_world_size"),
        (0, {}, "no executor is left"),
    ],
)
def test_too_few_slots_end_the_run_with_the_loss(slots: int, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(RankError, match=r"rank 1 was killed \(the run was started 1 time: .*") as caught:
        attempts(Shrinking(slots, slots, slots), **settings)
    assert told in str(caught.value)


def test_a_smaller_global_batch_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    attempts(Shrinking(2), batches="per_rank", min_world_size=1)
    assert "with 2 ranks instead of 4: the global batch is smaller by as much" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_five_kills_at_random_moments_change_nothing(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    world_size = draw.choice([1, 2, 3])

    def train() -> dict[str, Tensor]:
        return losses.train("none", epochs=1000)

    wanted = run(train, tmp_path / "wanted", world_size)
    over = threading.Event()

    def kill() -> None:
        for _ in range(5):
            if over.wait(draw.uniform(0.1, 1.0)):
                return
            with contextlib.suppress(OSError, ValueError, KeyError, AssertionError):  # it has ended, or begins
                os.kill(losses.record(tmp_path / "runs")["ranks"][str(draw.randrange(world_size))]["pid"], 9)

    thread = threading.Thread(target=kill)
    thread.start()
    found = run(train, tmp_path, world_size, max_failures=5)
    over.set()
    thread.join()
    assert 1 <= len(found.failures) <= 5
    assert losses.same(found.value, wanted.value)
    assert found.run_dir is not None
    assert wanted.run_dir is not None
    assert (found.run_dir / "rank-0.log").read_text() == (wanted.run_dir / "rank-0.log").read_text()
