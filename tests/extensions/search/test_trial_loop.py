"""The loop of a search, on real slots: what becomes of trials that end well, fail, are pruned, or lose their slot."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib
import math
import os
import signal
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.control_groups import available_cores
from lagom.errors import LagomError, MetricError
from lagom.extensions.search.on_rank.change import HparamsChange
from lagom.extensions.search.on_rank.messages import OutcomePart, RunTrial, TrialEnded, TrialReport
from lagom.extensions.search.slots.choose_slots import choose_slots
from lagom.extensions.search.trial_loop import TrialLoop
from lagom.extensions.search.trial_source import TrialOutcome, TrialSpec
from lagom.launch import choose
from lagom.plan import plan
from lagom.program.signature import Call
from lagom.wire.client import DriverClient
from lagom.wire.messages import Closed, LocalEvent, Lost, Message
from tests.extensions.search.searching import slot_join


class ListSource:
    """Trials with given hyperparameters, and a rule for pruning."""

    def __init__(
        self, trials: list[dict[str, Any]], prunes: Callable[[int, int, float], bool] = lambda *_: False
    ) -> None:
        self._trials = trials
        self._prunes = prunes
        self._asked = 0
        self.outcomes: dict[int, TrialOutcome] = {}
        self.reports: list[tuple[int, int, float]] = []

    @property
    def finished(self) -> bool:
        return self._asked == len(self._trials)

    def ask(self) -> TrialSpec | None:
        if self.finished:
            return None
        self._asked += 1
        params = self._trials[self._asked - 1]
        return TrialSpec(number=self._asked - 1, params=params, change=HparamsChange(params))

    def report(self, number: int, step: int, value: float) -> bool:
        self.reports.append((number, step, value))
        return self._prunes(number, step, value)

    def tell(self, number: int, outcome: TrialOutcome) -> None:
        assert number not in self.outcomes
        self.outcomes[number] = outcome


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)


def run(
    train: Callable[..., Any],
    source: ListSource,
    folder: Path,
    *,
    launcher: Any = "local",
    ranks: int = 1,
    slots: int = 2,
    max_failed: int | None = None,
    hparams: Mapping[str, Any] | None = None,
) -> dict[int, TrialOutcome]:
    config = TorchDistributedConfig(world_size=ranks, launcher=launcher, run_dir=None)
    where = choose(launcher)
    of_trial = dataclasses.replace(plan(config, where.cluster()), searches=True, keeps_logs=False)
    call = Call(function=train, provided={"hparams": hparams or {}})
    with choose_slots(where, of_trial, call, slots) as place:
        TrialLoop(source, of_trial, "loss", max_failed, folder / "trials", num_slots=slots).run(place)
    return source.outcomes


@pytest.mark.parametrize("chosen", ["", "3"])
def test_trials_share_the_cores_from_the_first_on_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    def train() -> Any:
        return {"loss": float(torch.get_num_threads())}

    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    found = run(train, ListSource([{}] * 4), tmp_path)
    assert {one.value for one in found.values()} == {float(chosen or max(1, available_cores() // 2))}


@pytest.mark.parametrize("launcher", [pytest.param("local", marks=pytest.mark.soak), "inline"])
def test_each_trial_has_its_hyperparameters_over_the_common_ones(tmp_path: Path, launcher: str) -> None:
    def train(hparams: Any, lr: Any) -> Any:
        return {"loss": torch.tensor(lr * hparams["scale"]), "seen": dict(hparams)}

    source = ListSource([{"lr": 0.5 * number} for number in range(5)])
    outcomes = run(train, source, tmp_path, launcher=launcher, hparams={"scale": 3.0, "lr": -1.0})
    assert [outcomes[number].value for number in range(5)] == [0.0, 1.5, 3.0, 4.5, 6.0]
    assert [outcomes[number].returned["seen"] for number in (0, 4)] == [
        {"scale": 3.0, "lr": 0.0},
        {"scale": 3.0, "lr": 2.0},
    ]
    assert {one.state for one in outcomes.values()} == {"complete"}


@pytest.mark.soak  # test_search.py has trials that save the same file
def test_trials_that_write_the_same_file_do_not_meet(tmp_path: Path) -> None:
    Path("data.txt").write_text("common")

    def train(number: Any) -> Any:
        assert Path("data.txt").read_text() == "common"
        Path("best.txt").write_text(f"of trial {number}")
        Path("logs").mkdir()
        Path("logs/more.txt").write_text("more")
        time.sleep(0.2)
        print("wrote", number)
        return float(Path("best.txt").read_text().split()[-1])

    outcomes = run(train, ListSource([{"number": number} for number in range(4)]), tmp_path)
    assert [outcomes[number].value for number in range(4)] == [0.0, 1.0, 2.0, 3.0]
    for number, outcome in outcomes.items():
        assert outcome.folder is not None
        assert (outcome.folder / "files/best.txt").read_text() == f"of trial {number}"
        assert (outcome.folder / "files/logs/more.txt").exists()
        assert (outcome.folder / "output.txt").read_text() == f"wrote {number}\n"
    assert sorted(path.name for path in Path().iterdir()) == ["data.txt"]


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("local", 1), pytest.param("local", 2, marks=pytest.mark.soak), ("inline", 1)]
)
def test_a_pruned_trial_ends_at_the_report(tmp_path: Path, launcher: str, ranks: int) -> None:
    def train(number: Any, reporter: Any) -> Any:
        for step in range(6):
            try:
                reporter.broadcast(number + step / 10, step)
            except Exception:
                raise AssertionError("an ordinary handler caught it") from None
            print("went on after", step)
        return 100.0

    source = ListSource([{"number": 0}, {"number": 1}], lambda number, step, value: number == 1 and step == 2)
    outcomes = run(train, source, tmp_path, launcher=launcher, ranks=ranks, slots=1)
    assert (outcomes[0].state, outcomes[0].value) == ("complete", 100.0)
    assert (outcomes[1].state, outcomes[1].value) == ("pruned", 1.2)
    assert [step for number, step, _ in source.reports if number == 1] == [0, 1, 2]
    assert [step for number, step, _ in source.reports if number == 0] == [0, 1, 2, 3, 4, 5]
    if launcher == "local":
        assert outcomes[1].folder is not None
        assert (outcomes[1].folder / "output.txt").read_text() == "went on after 0\nwent on after 1\n"


def test_a_rank_that_only_sees_a_pruned_one_end_has_not_failed_and_one_with_an_error_has(tmp_path: Path) -> None:
    def train(number: Any, reporter: Any) -> Any:
        import lagom

        for step in range(3):
            if lagom.rank() == 0:
                reporter.broadcast(float(step), step)
            elif number == 1 and step == 2:
                raise ValueError("of its own")
            parameter = torch.nn.Parameter(torch.ones(1))
            parameter.sum().backward()  # rank 1 waits here for one that has ended
        return 5.0

    source = ListSource([{"number": 0}, {"number": 1}], lambda number, step, value: step == 2)
    outcomes = run(train, source, tmp_path, ranks=2, slots=1)
    assert (outcomes[0].state, outcomes[0].value, outcomes[0].error) == ("pruned", 2.0, "")
    assert (outcomes[1].state, outcomes[1].error) == ("failed", "ValueError: of its own")


def test_ranks_with_different_metrics_are_named_once_in_a_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(number: Any) -> Any:
        import lagom

        return number + lagom.rank()

    outcomes = run(train, ListSource([{"number": 0.5}, {"number": 2.5}, {"number": 4.5}]), tmp_path, ranks=2, slots=1)
    assert [outcomes[n].value for n in range(3)] == [1.0, 3.0, 5.0]
    (said,) = caplog.messages
    assert said.startswith("trial 0: the ranks returned different values: (0.5, 1.5); taking their mean")
    assert "per_rank" not in said


def test_a_program_that_catches_everything_is_still_pruned(tmp_path: Path) -> None:
    def train(reporter: Any) -> Any:
        for step in range(3):
            try:
                reporter.broadcast(1.0, step)
            except:  # noqa: E722, PERF203
                print("caught")
        return 5.0

    outcomes = run(train, ListSource([{}], lambda number, step, value: True), tmp_path)
    assert (outcomes[0].state, outcomes[0].value) == ("pruned", 1.0)


@pytest.mark.parametrize("launcher", [pytest.param("local", marks=pytest.mark.soak), "inline"])
def test_a_failing_trial_is_a_row_and_the_others_go_on(tmp_path: Path, launcher: str) -> None:
    def train(number: Any) -> Any:
        if number == 1:
            raise KeyError("no such thing")
        return number

    outcomes = run(train, ListSource([{"number": n} for n in range(4)]), tmp_path, launcher=launcher)
    assert [outcomes[n].state for n in range(4)] == ["complete", "failed", "complete", "complete"]
    assert outcomes[1].error == "KeyError: 'no such thing'"
    assert "in train" in outcomes[1].traceback


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_too_many_failures_in_a_row_raise_the_last_ones_error(tmp_path: Path, launcher: str) -> None:
    def train(number: Any) -> Any:
        if number > 0:
            raise ZeroDivisionError(f"in trial {number}")
        return 1.0

    source = ListSource([{"number": n} for n in range(9)])
    with pytest.raises(ZeroDivisionError, match="in trial") as raised:
        run(train, source, tmp_path, launcher=launcher, slots=1, max_failed=3)
    assert [source.outcomes[n].state for n in range(4)] == ["complete", "failed", "failed", "failed"]
    assert "3 trials failed" in raised.value.__notes__[-1]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"accuracy": 0.5}, "a dict with 'accuracy', and not 'loss'"),
        (None, "return value is None; want a number"),
        ({"loss": "low"}, "entry 'loss' is 'low'"),
        ({"loss": torch.zeros(3)}, r"shape \(3,\); want one number"),
    ],
)
def test_a_trial_without_a_metric_ends_the_search_at_once(tmp_path: Path, returned: Any, message: str) -> None:
    source = ListSource([{}] * 9)
    with pytest.raises(MetricError, match=message):
        run(lambda: returned, source, tmp_path, launcher="inline", slots=1)
    assert len(source.outcomes) == 1


@pytest.mark.soak
def test_later_trials_find_the_libraries_that_the_first_has_imported(tmp_path: Path) -> None:
    def train() -> Any:
        found = "pandas" in sys.modules
        pandas = importlib.import_module("pandas")
        return float(found) + float(pandas.Series([0.0]).sum())

    outcomes = run(train, ListSource([{}] * 3), tmp_path, slots=1)
    assert [outcomes[n].value for n in range(3)] == [0.0, 1.0, 1.0]


def test_a_killed_trial_is_a_row(tmp_path: Path) -> None:
    def train(number: Any) -> Any:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    outcomes = run(train, ListSource([{"number": n} for n in range(3)]), tmp_path)
    assert [outcomes[n].state for n in range(3)] == ["complete", "failed", "complete"]
    assert "SIGKILL" in outcomes[1].error


def test_a_trial_whose_slot_is_lost_runs_again_on_another(tmp_path: Path) -> None:
    marker = Path(f"/dev/shm/lagom-test-{os.getpid()}")  # devices are real for every trial

    def train(number: Any) -> Any:
        print("attempt")
        if number == 1 and not marker.exists():
            marker.touch()
            time.sleep(0.5)  # for the line to arrive
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(30)
        return number

    try:
        outcomes = run(train, ListSource([{"number": n} for n in range(4)]), tmp_path, slots=1)
    finally:
        marker.unlink()
    assert [outcomes[n].value for n in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert outcomes[1].folder is not None
    assert (outcomes[1].folder / "output.txt").read_text() == "attempt\n"  # of one attempt


@pytest.mark.soak  # a test below has one that is lost for good
def test_a_trial_that_always_kills_its_slot_fails(tmp_path: Path) -> None:
    def train(number: Any) -> Any:
        if number == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(30)
        return number

    outcomes = run(train, ListSource([{"number": n} for n in range(3)]), tmp_path, slots=1)
    assert [outcomes[n].state for n in range(3)] == ["complete", "failed", "complete"]
    assert "lost 4 times" in outcomes[1].error


@pytest.mark.soak  # others above are failures in a row
def test_trials_that_kill_their_slots_are_failures_in_a_row(tmp_path: Path) -> None:
    def train(number: Any) -> Any:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(30)

    source = ListSource([{"number": n} for n in range(9)])
    with pytest.raises(LagomError, match=r"2 trials failed one after another.* were lost 4 times"):
        run(train, source, tmp_path, slots=1, max_failed=2)


def test_slots_that_cannot_start_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lagom.extensions.search.slots.local_slots.server", lambda: _NoServer())
    with pytest.raises(LagomError, match="ended as soon as they started"):
        run(lambda: 1.0, ListSource([{}]), tmp_path)


class _NoServer:
    def send(self, request: bytes, fds: list[int]) -> None:
        pass


def test_slots_that_cannot_start_end_the_search_with_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lagom.extensions.search.slots.local_slots.server", lambda: _FullDisk())
    with pytest.raises(LagomError, match="ended as soon as they started: OSError: No space left on device"):
        run(lambda: 1.0, ListSource([{}]), tmp_path)


class _FullDisk:
    def send(self, request: bytes, fds: list[int]) -> None:
        with contextlib.closing(DriverClient(socket.socket(fileno=os.dup(fds[0])))) as link:
            link.send(FULL_DISK)


FULL_DISK = Lost(message="OSError: No space left on device")
ENDED = TrialEnded(reports=[TrialReport(rank=0, ok=True, metric=1.0, samples=1)], seconds=1.0, problems=[])


class OneSlot:
    """A slot of another host, which answers each trial with ``messages``; after a loss it joins again."""

    def __init__(self, *messages: Message | LocalEvent) -> None:
        self._messages = messages
        self._join = slot_join(0, host="other")
        self._waiting: list[Message | LocalEvent] = [self._join]

    def __enter__(self) -> OneSlot:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def send(self, slot: int, message: Message) -> None:
        if isinstance(message, RunTrial):
            self._waiting += self._messages
            self._waiting += [self._join] * isinstance(self._messages[-1], Closed)

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        take(0, self._waiting.pop(0))

    def release(self, slot: int) -> bool:
        return False

    def over(self) -> None:
        pass


def run_on(slot: OneSlot, source: ListSource, folder: Path, max_failed: int | None = None) -> dict[int, TrialOutcome]:
    of_trial = plan(TorchDistributedConfig(world_size=1), Cluster(launcher="spark", slots=1))
    TrialLoop(source, of_trial, "loss", max_failed, folder / "trials").run(slot)
    return source.outcomes


def test_a_trial_whose_slot_is_lost_for_good_says_why(tmp_path: Path) -> None:
    (outcome,) = run_on(OneSlot(FULL_DISK, Closed()), ListSource([{}]), tmp_path).values()
    assert outcome.error.endswith("were lost 4 times: OSError: No space left on device")


def test_a_link_that_leads_out_of_a_trials_folder_is_named_and_the_other_files_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept/files"
    kept.mkdir(parents=True)
    (kept / "last.ckpt").symlink_to(tmp_path / "elsewhere.ckpt")
    (kept / "best.txt").write_text("best")
    with tarfile.open(tmp_path / "packed.tar", "w") as tar:
        tar.add(kept.parent, arcname=".")
    data = base64.b64encode((tmp_path / "packed.tar").read_bytes()).decode()
    part = OutcomePart(name="files", data=data)
    (outcome,) = run_on(OneSlot(part, ENDED), ListSource([{}]), tmp_path).values()
    assert (outcome.state, outcome.value) == ("complete", 1.0)
    assert outcome.folder is not None
    assert [path.name for path in (outcome.folder / "files").iterdir()] == ["best.txt"]
    assert "files/last.ckpt, which rank 0 wrote, was not put into" in caplog.text


def test_a_metric_that_is_no_number_fails_and_neither_counts_nor_ends_a_row_of_failures(tmp_path: Path) -> None:
    values: list[Any] = [1.0, math.nan, math.nan, math.nan, "low", math.nan, "low", 2.0]
    source = ListSource([{"value": value} for value in values])
    with pytest.raises(ValueError, match="low"):
        run(lambda value: float(value), source, tmp_path, launcher="inline", slots=1, max_failed=2)
    assert [one.state for one in source.outcomes.values()] == ["complete"] + ["failed"] * 6
    assert source.outcomes[1].value is None
    assert source.outcomes[1].error == "ValueError: the metric is nan; want a number"


def test_a_metric_that_is_no_number_is_not_a_trial_that_has_completed(tmp_path: Path) -> None:
    source = ListSource([{"returned": math.nan}, {"returned": "low"}])
    with pytest.raises(MetricError, match="'low'"):
        run(lambda returned: returned, source, tmp_path, launcher="inline", slots=1)


class ReleasedSlots(OneSlot):
    """Two slots, the second of which is lost with its first trial once the first slot is released, and joins again."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, Message | LocalEvent]] = [(slot, slot_join(slot, host="a")) for slot in range(2)]
        self.released: list[int] = []
        self._is_lost = False
        self._num_served = 0

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        self._num_served += 1
        assert self._num_served < 100, "no slot is released"
        if self.released and not self._is_lost:
            self._is_lost = True
            self._events += [(1, Closed()), (2, slot_join(2, host="a"))]
        for slot, message in self._events[:1]:
            del self._events[0]
            take(slot, message)

    def send(self, slot: int, message: Message) -> None:
        if isinstance(message, RunTrial) and slot != 1:
            self._events.append((slot, ENDED))

    def release(self, slot: int) -> bool:
        self.released.append(slot)
        return True


def test_an_idle_slot_is_released_once_no_trial_is_left(tmp_path: Path) -> None:
    source, slots = ListSource([{}] * 3), ReleasedSlots()
    of_trial = plan(TorchDistributedConfig(world_size=1), Cluster(launcher="spark", slots=2))
    TrialLoop(source, of_trial, "loss", None, tmp_path / "trials", num_slots=2).run(slots)
    assert slots.released == [0]
    assert {number: outcome.state for number, outcome in source.outcomes.items()} == dict.fromkeys(range(3), "complete")
