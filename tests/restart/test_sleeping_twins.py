"""Sleeping twins: killed ranks go on from the middle of a pass, and the run is like one that was not killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.restart.history import BEGINNING
from lagom.result import Result
from tests.launchers.losses import record, wait_for
from tests.restart import twin_programs as programs

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="twins need Linux")


def run(
    program: Callable[[str], dict[str, Any]],
    folder: Path,
    world_size: int,
    kills: Sequence[int],
    ready: Callable[[Path], bool] = lambda _: True,
    **settings: Any,
) -> tuple[Result, dict[str, bytes]]:
    """Run ``program``, and kill these ranks one after another, each after twins have been forked; return the files.

    Args:
        ready: whether the program has come to where it is to be killed, by the folder of its files.
    """
    files = folder / "files"
    files.mkdir(parents=True)
    config = TorchDistributedConfig(
        launcher="local",
        world_size=world_size,
        run_dir=folder / "run",
        sleeping_twins=True,
        hparams={"folder": str(files)},
        **{"max_failures": len(kills), **settings},
    )
    with held_back(folder, lambda over: kill_each(kills, folder / "run", lambda: ready(files), over)):
        result = experiment.lagom(program, config)
    return result, {path.name: path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file()}


@contextmanager
def held_back(folder: Path, until: Callable[[threading.Event], None]) -> Iterator[None]:
    """Have a program pause in each step until ``until`` returns, which is told when the program has ended."""
    gate = folder / "slowly"
    over, failed = threading.Event(), list[BaseException]()

    def watch() -> None:
        try:
            until(over)
        except BaseException as error:
            failed.append(error)
        gate.unlink()

    gate.touch()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with patch.dict(os.environ, {programs.GATE: str(gate)}):
            yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


def kill_each(kills: Sequence[int], run_dir: Path, ready: Callable[[], bool], over: threading.Event) -> None:
    """Kill these ranks one after another, each some steps after its twin was forked, or later when ``ready``."""
    before: dict[str, Any] = {"failures": [], "ranks": {}}
    for rank in kills:
        found = before
        while not have_new_twins(before, found) and not over.is_set():
            wait_for(lambda known=found: over.is_set() or facts(run_dir) != known)  # type: ignore[misc]
            found = facts(run_dir) or found
        over.wait(3 * programs.PAUSE_S)
        wait_for(lambda: over.is_set() or ready())
        assert not over.is_set(), "the run has ended before"
        os.kill(found["ranks"][str(rank)]["pid"], signal.SIGKILL)
        before = found | {"failures": [*found["failures"], rank]}


def have_new_twins(before: dict[str, Any], found: dict[str, Any]) -> bool:
    """Return whether ``found`` in run.json are other processes with other twins, or such as have begun again."""
    pids = [one.get("pid") for one in found["ranks"].values()]
    if len(found["failures"]) != len(before["failures"]) or not pids or None in pids:
        return False
    if set(pids) & {one["pid"] for one in before["ranks"].values()}:
        return False
    begins_again = bool(found["failures"]) and found["failures"][-1]["resumed_from"] == BEGINNING
    return begins_again or found.get("twins") not in (None, before.get("twins"))


def facts(run_dir: Path) -> dict[str, Any]:
    """Return run.json; nothing while it is not there, or being written."""
    with contextlib.suppress(ValueError):
        return record(run_dir)
    return {}


def without_twins(program: Callable[[str], dict[str, Any]], folder: Path) -> tuple[Result, str]:
    """Run ``program``, which cannot have twins, until the record says why; return what it says."""

    with held_back(folder, lambda over: wait_for(lambda: over.is_set() or "without_twins" in facts(folder / "run"))):
        config = TorchDistributedConfig(
            launcher="local", world_size=2, run_dir=folder / "run", sleeping_twins=True, hparams={"folder": str(folder)}
        )
        result = experiment.lagom(program, config)
    assert result.failures == []
    return result, record(folder / "run")["without_twins"]


def events(data: bytes, folder: Path) -> list[Any]:
    """Return the numbers in a file of TensorBoard's."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    path = folder / "events"
    path.write_bytes(data)
    return [
        (event.step, [value.tensor.float_val[:] for value in event.summary.value])
        for event in EventFileLoader(str(path)).Load()
    ]


def content(files: dict[str, bytes], folder: Path) -> dict[str, Any]:
    """Return files by name, in a form that is equal for equal content."""
    return {
        "events" if "tfevents" in name else name: events(data, folder) if "tfevents" in name else data
        for name, data in files.items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether all values have the same bits."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one
    )


@pytest.mark.parametrize(
    ("program", "world_size", "kills", "settings"),
    [
        pytest.param(programs.evaluates, 2, [0], {}, marks=pytest.mark.soak),
        pytest.param(programs.evaluates_by_rows, 3, [2], {}, marks=pytest.mark.soak),
        (programs.evaluates, 2, [1, 0], {"batches": "split"}),
        pytest.param(programs.accumulates, 2, [1], {}, marks=pytest.mark.soak),
        pytest.param(programs.streams, 2, [1], {}, marks=pytest.mark.soak),
        pytest.param(programs.with_workers, 2, [1], {}, marks=pytest.mark.soak),
        pytest.param(programs.with_workers, 2, [0], {"share_workers": True}, marks=pytest.mark.soak),
        # Passes of 5 s, between which alone there are twins; else what the two before show.
        pytest.param(programs.has_long_passes, 2, [1], {}, marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_goes_on_within_the_pass(
    program: Callable[[str], dict[str, Any]],
    world_size: int,
    kills: list[int],
    settings: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole, files = run(program, tmp_path / "whole", world_size, [], **settings)
    text = capfd.readouterr().out
    killed, files_killed = run(program, tmp_path / "killed", world_size, kills, **settings)
    found = capfd.readouterr()
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))
    assert found.out == text
    assert content(files_killed, tmp_path) == content(files, tmp_path)
    assert [failure["rank"] for failure in killed.failures] == kills
    for failure in killed.failures:
        assert re.fullmatch(r"batch \d+ of epoch \d+|after \d+ backwards", failure["resumed_from"]), failure
    assert found.err.count("the run goes on from") == len(kills)


@pytest.mark.soak
def test_a_file_whose_time_was_set_is_found_as_it_was(tmp_path: Path) -> None:
    whole, _ = run(programs.sets_times, tmp_path / "whole", 2, [])
    killed, _ = run(
        programs.sets_times, tmp_path / "killed", 2, [1], lambda files: os.stat(files / "stamp").st_mtime > 0
    )
    assert same(whole.per_rank[0], killed.per_rank[0])


def test_files_that_were_rewritten_are_found_as_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, _ = run(programs.saves, tmp_path / "whole", 2, [])
    text = capfd.readouterr().out
    killed, files = run(programs.saves, tmp_path / "killed", 2, [0, 1])
    assert same(whole.per_rank[0], killed.per_rank[0])
    assert capfd.readouterr().out == text
    assert len(killed.failures) == 2
    assert list(files) == ["state.pt"]


def test_a_program_with_a_thread_has_no_twins_and_the_record_says_so(tmp_path: Path) -> None:
    _, why = without_twins(programs.keeps_a_thread, tmp_path)
    assert why == "the program has a thread, watcher"


def test_a_batch_that_workers_have_shared_is_the_twins_own(tmp_path: Path) -> None:
    whole, _ = run(programs.changes_a_kept_batch, tmp_path / "whole", 2, [])
    killed, _ = run(programs.changes_a_kept_batch, tmp_path / "killed", 2, [1, 0])
    assert [failure["resumed_from"] for failure in killed.failures if failure["resumed_from"] == BEGINNING] == []
    assert len(killed.failures) == 2
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))


@pytest.mark.soak  # the first test is such a run, with fewer reports
def test_a_file_of_lagom_s_own_that_is_open_for_a_moment_is_not_the_program_s(tmp_path: Path) -> None:
    killed, _ = run(programs.reports_slowly, tmp_path, 2, [1, 0], hb_interval=0.005)
    assert [failure["resumed_from"] == BEGINNING for failure in killed.failures] == [False, False]


@pytest.mark.soak  # the reason of a program with a thread comes the same way
def test_twins_that_could_not_be_forked_are_told_of(tmp_path: Path) -> None:
    assert without_twins(programs.cannot_fork_twice, tmp_path)[1] == "it could not be forked"


@pytest.mark.soak  # test_twin_pace.py shows by default when they are tried again
def test_twins_are_forked_again_after_one_could_not_be(tmp_path: Path) -> None:
    killed, _ = run(programs.cannot_fork_at_first, tmp_path, 2, [1])
    assert [failure["resumed_from"] == BEGINNING for failure in killed.failures] == [False]


@pytest.mark.soak  # test_a_killed_rank_goes_on_within_the_pass needs such twins
def test_twins_count_once_no_process_stands_between(tmp_path: Path) -> None:
    states: list[str] = []

    def look(over: threading.Event) -> None:
        wait_for(lambda: over.is_set() or "twins" in facts(tmp_path / "run"))
        for rank in record(tmp_path / "run")["ranks"].values():
            children = Path(f"/proc/{rank['pid']}/task/{rank['pid']}/children").read_text().split()
            states.append("".join(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] for pid in children))

    with held_back(tmp_path, look):
        config = TorchDistributedConfig(
            launcher="local", world_size=2, run_dir=tmp_path / "run", sleeping_twins=True, hparams={"folder": ""}
        )
        experiment.lagom(programs.ends_slowly, config)
    assert set(states) <= {"", "Z"}
    assert len(states) == 2


@pytest.mark.soak  # test_a_batch_that_workers_have_shared_is_the_twins_own has batches of workers
def test_memory_that_a_program_shares_with_its_workers_stays_shared(tmp_path: Path) -> None:
    config = TorchDistributedConfig(launcher="local", world_size=2, hparams={"folder": str(tmp_path)})
    plain = experiment.lagom(programs.counts, config)
    twins, why = without_twins(programs.counts, tmp_path)
    assert all(same(one, other) for one, other in zip(plain.per_rank, twins.per_rank, strict=True))
    assert why.startswith("the program shares memory, /dev/shm/torch_")


def test_twins_that_cannot_go_on_are_no_second_loss(tmp_path: Path) -> None:
    whole, files = run(programs.rewrites_its_status, tmp_path / "whole", 2, [])
    killed, files_killed = run(programs.rewrites_its_status, tmp_path / "killed", 2, [1])
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))
    assert files_killed == files
    assert [failure["resumed_from"] for failure in killed.failures] == ["the beginning"]


@pytest.mark.soak  # test_shown_output.py and test_a_killed_rank_goes_on_within_the_pass
def test_output_is_shown_once_after_forks_that_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, _ = run(programs.gets_a_hidden_thread, tmp_path / "whole", 2, [])
    text = capfd.readouterr().out
    run_dir = tmp_path / "killed" / "run"
    killed, _ = run(
        programs.gets_a_hidden_thread, tmp_path / "killed", 2, [1], lambda _: "without_twins" in facts(run_dir)
    )
    assert capfd.readouterr().out == text
    assert len(killed.failures) == 1
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))
    assert record(run_dir)["without_twins"] == "the program has threads that are not Python's"


def test_a_program_that_redirects_its_output_has_no_twins(tmp_path: Path) -> None:
    _, why = without_twins(programs.redirects_its_output, tmp_path)
    assert (tmp_path / "out.log").read_text() == "".join(f"epoch {epoch}\n" for epoch in range(6))
    assert why == "the program has put another file in the place of its output"


@pytest.mark.soak
def test_a_held_file_whose_head_was_changed_is_found_as_it_was(tmp_path: Path) -> None:
    whole, files = run(programs.counts_at_the_head, tmp_path / "whole", 2, [])
    killed, files_killed = run(programs.counts_at_the_head, tmp_path / "killed", 2, [1])
    assert same(whole.per_rank[0], killed.per_rank[0])
    assert files_killed == files


@pytest.mark.soak
def test_twins_end_when_another_program_is_started(tmp_path: Path) -> None:
    killed, _ = run(programs.starts_a_program, tmp_path, 2, [], max_failures=1)
    assert [failure["resumed_from"] for failure in killed.failures] == ["the beginning"]
