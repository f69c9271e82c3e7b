"""``lagom.watch.progress``: how far a run is, for a person."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.plan import plan
from lagom.watch import progress as progress_module
from lagom.watch import status_line as module
from lagom.watch.progress import Progress
from lagom.wire.messages import Doing, ProgressReport, Stalled, TaskJoined
from tests.watch.heartbeats import report_of


class Terminal(io.StringIO):
    """Standard error, and whether it is one."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self.live = live

    def isatty(self) -> bool:
        return self.live


def shown(
    monkeypatch: pytest.MonkeyPatch, live: bool, world_size: int = 2, every_s: float | None = 0.0
) -> tuple[Progress, Terminal]:
    stream = Terminal(live)
    monkeypatch.setattr(sys, "stderr", stream)
    the_plan = plan(TorchDistributedConfig(world_size=world_size, name="train"), Cluster(launcher="spark", slots=99))
    return Progress(the_plan, "Spark local[2]", every_s=every_s), stream


def step(rank: int, **more: Any) -> ProgressReport:
    facts: dict[str, Any] = {"rank": rank, "epoch": 1, "step": 3, "steps": 10, "samples": 4096}
    return report_of(**facts | more)


def stall(rank: int, *, waits: bool) -> Stalled:
    return Stalled(rank=rank, quiet_s=60.0, work=Doing(stack="", line="", waits=waits))


def test_where_the_ranks_are_is_said_once_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False, world_size=3)
    progress.joined(TaskJoined(host="b", ranks=[2], cores=0))
    assert stream.getvalue() == ""
    progress.joined(TaskJoined(host="a", ranks=[0, 1], cores=0))
    assert stream.getvalue() == "lagom: train: 3 ranks on Spark local[2] (a: ranks 0-1, b: rank 2)\n"


def test_ranks_of_a_host_that_do_not_follow_each_other_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False, world_size=3)
    for rank, host in ((0, "a"), (1, "b"), (2, "a")):
        progress.joined(TaskJoined(host=host, ranks=[rank], cores=0))
    assert "a: ranks 0, 2, b: rank 1" in stream.getvalue()


def test_a_log_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False, every_s=None)
    for _ in range(100):
        progress.update(step(0))
    assert stream.getvalue() == ""
    progress, stream = shown(monkeypatch, live=False)
    progress.update(step(0))
    assert stream.getvalue() == "lagom: rank 0: epoch 1, step 3/10, 4,096 samples\n"


def test_a_rank_is_starting_until_its_function_is_called_and_then_running(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False)
    progress.update(step(0))
    begun: dict[str, Any] = {"step": 0, "steps": None, "samples": 0, "memory": 3 * 10**8}
    for more in ({"epoch": 0, "starts": True}, {"epoch": 0}, {"epoch": 1}):
        progress.update(step(1, **begun | more))
    lines = [line.partition(" | ")[2] for line in stream.getvalue().splitlines()[1:]]
    assert lines == [f"rank 1: {state}, 0.3 GB" for state in ("starting", "running", "epoch 1, step 0, 0 samples")]


def test_values_that_extensions_set_are_shown_after_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False)
    progress.update(step(0, loss=0.5, values={"NaNs": 12345, "norm": 0.123456}, memory=3 * 10**8))
    line = "lagom: rank 0: epoch 1, step 3/10, 4,096 samples, loss 0.5, NaNs 12,345, norm 0.1235, 0.3 GB\n"
    assert stream.getvalue() == line


def test_a_terminal_gets_one_line_that_renews_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=True)
    progress.update(step(0))
    progress.update(step(1, step=4))
    assert "\n" not in stream.getvalue()
    last = stream.getvalue().split("\r")[-1]
    assert last == "lagom: rank 0: epoch 1, step 3/10, 4,096 samples | rank 1: epoch 1, step 4/10, 4,096 samples"


def test_the_line_makes_room_for_what_the_program_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=True)
    progress.update(step(0))
    line = stream.getvalue()
    progress.line.make_room(stream, "loss 0.1\n")
    assert stream.getvalue() == line + "\r" + " " * len(line) + "\r"
    progress.line.make_room(stream, "loss 0.1\n")
    assert stream.getvalue() == line + "\r" + " " * len(line) + "\r"


def test_the_last_line_is_left_standing(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=True)
    progress.update(step(0))
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("samples\n")


def test_many_ranks_stay_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=True, world_size=64)
    for rank in range(64):
        progress.update(step(rank))
    assert len(stream.getvalue().split("\r")[-1]) <= 160


def test_an_unknown_number_of_steps_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False)
    progress.update(step(0, steps=None))
    assert "step 3," in stream.getvalue()


def test_waiting_is_said_once_with_numbers_and_not_when_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False)
    progress.waiting(2, 2)
    assert stream.getvalue() == ""
    progress.waiting(1, 2)
    progress.waiting(1, 2)
    assert stream.getvalue().count("\n") == 1
    assert "1 of 2" in stream.getvalue()
    assert "Spark local[2]" in stream.getvalue()


def test_a_rank_that_holds_up_the_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=True)
    progress.update(step(0, waits=0.31, waits_for={"1": 0.31}))
    progress.update(step(1))
    assert "the others wait for it 31% of their time" in stream.getvalue().rpartition("rank 1:")[2]


def test_the_line_keeps_away_from_one_that_the_program_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=True)
    progress.line.make_room(stream, "\r 10%|#  ")
    progress.update(step(0))
    assert stream.getvalue() == ""
    progress.warn("rank 1 is slow")
    assert stream.getvalue() == "\nlagom: train: rank 1 is slow\n"
    progress.update(step(0))
    assert stream.getvalue().endswith("samples")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(module, "terminal_columns", lambda: columns)
    progress, stream = shown(monkeypatch, live=True, world_size=3)
    for rank, samples in ((0, 4096), (1, 4000), (2, 4050)):
        progress.update(step(rank, samples=samples))
    line = stream.getvalue().split("\r")[-1]
    assert len(line) < columns
    if columns > 40:  # there is room for one: that which is the farthest behind
        assert "rank 1: epoch 1" in line
        assert line.endswith(" more ranks") or columns == 120
    monkeypatch.setattr(module, "terminal_columns", lambda: 20)
    progress.line.make_room(stream, "x\n")
    assert stream.getvalue().endswith("\r" + " " * 19 + "\r")


def test_a_loss_of_zero_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False)
    for loss in (0.5, 0.0, None):
        progress.update(step(0, loss=loss))
    assert [line.rpartition("loss ")[2] for line in stream.getvalue().splitlines()] == ["0.5", "0", "0"]


class Display:
    """A notebook's display module with one display, and its pages in their order."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Display:
        self.pages.append(bundle["text/html"])
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.pages.append(bundle["text/html"])


def test_a_notebook_shows_waiting_running_and_stalled_ranks_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display()
    monkeypatch.setattr(progress_module, "notebook", lambda: display)
    progress, stream = shown(monkeypatch, live=False)
    progress.waiting(1, 2)
    assert "<b>train</b>: waiting for Spark local[2] to start the tasks (1 of 2 are here)" in display.pages[-1]
    progress.joined(TaskJoined(host="a", ranks=[0, 1], cores=0))
    progress.update(step(0))
    assert display.pages[-1].count("<tr>") == 1 + 2
    assert ">starting<" in display.pages[-1]  # rank 1, which has not reported yet
    progress.update(step(1))
    assert ">starting<" not in display.pages[-1]
    assert "<b>train</b>: 2 ranks on Spark local[2] (a: ranks 0-1)" in display.pages[-1]
    progress.show_notice("lagom: Net is <small>")
    assert ">Net is &lt;small&gt;</div>" in display.pages[-1]
    assert stream.getvalue() == ""
    progress.stalled({0: stall(0, waits=True), 1: stall(1, waits=False)}, "rank 1 made no progress for 60 s")
    assert ">rank 1 made no progress</b>" in display.pages[-1]
    assert stream.getvalue() == "lagom: train: rank 1 made no progress for 60 s\n"
    progress.update(step(1, step=4))
    assert "made no progress" not in display.pages[-1]
    progress.close("done")
    assert "<b>done</b>" in display.pages[-1]


def test_a_rank_that_has_never_reported_has_a_row_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display()
    monkeypatch.setattr(progress_module, "notebook", lambda: display)
    progress, _ = shown(monkeypatch, live=False, world_size=32)
    progress.joined(TaskJoined(host="a", ranks=list(range(32)), cores=0))
    for rank in range(16, 32):
        progress.update(step(rank, steps_s=1.0))
    assert ">starting<" not in display.pages[-1]  # those that train come first, and there is room for 16
    assert "this epoch ends in 0:07" in display.pages[-1]
    progress, _ = shown(monkeypatch, live=False)
    progress.joined(TaskJoined(host="a", ranks=[0, 1], cores=0))
    progress.update(step(0))
    progress.close("failed on rank 1: ValueError")
    assert display.pages[-1].count("<tr>") == 1 + 2


def test_a_notebook_is_told_how_a_run_ended_that_never_began(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display()
    monkeypatch.setattr(progress_module, "notebook", lambda: display)
    progress, _ = shown(monkeypatch, live=False)
    progress.waiting(0, 2)
    progress.close("interrupted")
    assert "interrupted" in display.pages[-1]


def test_tasks_of_this_machine_can_reach_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False)
    progress.waiting(0, 2)
    assert "cannot reach" not in stream.getvalue()


def test_a_slow_start_is_told_from_tasks_that_cannot_reach_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stream = shown(monkeypatch, live=False)
    the_plan = plan(TorchDistributedConfig(world_size=2, name="train"), Cluster(launcher="spark", slots=2))
    progress = Progress(the_plan, "Spark spark://host:7077")
    progress.waiting(0, 2)
    assert "waiting for Spark spark://host:7077 to start the tasks (0 of 2 are here)\n" in stream.getvalue()
    progress.waiting(0, 2)
    assert stream.getvalue().count("\n") == 1
    monkeypatch.setattr(progress_module, "SLOW_START_S", 0.0)
    progress.waiting(1, 2)
    assert "cannot reach" not in stream.getvalue()  # one has reached it
    progress.waiting(0, 2)
    progress.waiting(0, 2)
    assert stream.getvalue().count("if they run, they cannot reach this process") == 1


def test_more_ranks_than_cores_are_told_in_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream = shown(monkeypatch, live=False, world_size=20)
    progress.joined(TaskJoined(host="a", ranks=list(range(16)), cores=2))
    progress.joined(TaskJoined(host="b", ranks=list(range(16, 20)), cores=4))
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("; 16 ranks on 2 cores of a are slower than 2: take fewer (world_size=, -n)")
    progress, stream = shown(monkeypatch, live=False, world_size=2)
    progress.joined(TaskJoined(host="a", ranks=[0, 1], cores=2))
    assert "cores" not in stream.getvalue()


def test_ranks_report_that_they_start_until_their_function_is_called(tmp_path: Path) -> None:
    def wait_for_reports() -> list[int]:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/progress.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [1, 2]

    config = TorchDistributedConfig(
        launcher="local", world_size=1, run_dir=tmp_path, hb_interval=0.05, train_set=wait_for_reports
    )
    result = experiment.lagom(lambda train_set: len(train_set), config)
    assert result["test result"] == 2
    assert result.run_dir is not None
    first = (result.run_dir / "progress.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["starts"]
