"""Runs that fail, on every kind of Spark: a short clear error, soon, and the next call works."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import lagom
from lagom.errors import PayloadError, PlanError, RankError, StallError
from tests.integration import programs

pytestmark = pytest.mark.parametrize(
    "spark", ["local[2]", "local-cluster", "standalone", "connect"], indirect=True, scope="session"
)


@pytest.fixture(scope="session")
def workers(spark: Any) -> None:
    """Begin the first test on a cluster that has its workers; the others begin after a run that ended."""
    programs.run(programs.nothing, 2)


@pytest.fixture(autouse=True)
def the_next_call_works(workers: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """End each test with a run that succeeds; on Spark Connect, tests of other files do so by default."""
    yield
    is_last = request.function is test_ctrl_c_ends_job_and_ranks
    if not is_last and (request.node.callspec.params["spark"] == "local[2]" or "soak" in request.keywords):
        assert programs.run(programs.place, 2).per_rank == ((0, 2), (1, 2))


def test_error_arrives_while_another_rank_sleeps(spark: Any) -> None:
    with pytest.raises(programs.LateError, match="the disk is full") as caught:
        programs.run(programs.raise_while_the_other_sleeps, 2)
    cause = str(caught.value.__cause__)
    assert "on rank 1" in cause
    assert 'raise LateError("the disk is full", time.time())' in cause


@pytest.mark.soak  # above, another rank sleeps
def test_error_arrives_while_another_rank_waits_for_gradients(spark: Any) -> None:
    with pytest.raises(programs.LateError, match="a bad sample") as caught:
        programs.run(programs.raise_while_the_other_reduces, 2, module=programs.Net, train_set=programs.points())
    assert "on rank 1" in str(caught.value.__cause__)


@pytest.mark.soak  # tests/driver/test_stalls.py shows it by default
def test_a_rank_that_is_stuck_is_named_and_ended(spark: Any) -> None:
    with pytest.raises(StallError, match=r"rank 1 made no progress for \d+ s") as caught:
        programs.run(programs.be_stuck, 2, stall_timeout_s=3.0, timeout_s=6.0)
    assert "in be_stuck" in str(caught.value.__cause__)


@pytest.mark.soak  # tests/driver/test_stalls.py shows some by default
@pytest.mark.parametrize(
    ("kind", "at", "waits_in"),
    [
        ("sleep", "time.sleep(1000)", r"exchange \d+ of \d+ bytes \(gradients\)"),
        ("loop", 'while kind == "loop"', r"exchange \d+ of \d+ bytes \(gradients\)"),
        ("worker", "in __getitem__", r"exchange \d+ of \d+ bytes \(gradients\)"),
        ("skipped", "in skip_an_exchange", r"all_reduce \d+ \(sum\) of 250 float32"),
    ],
)
def test_what_others_wait_for_is_named(
    spark: Any, kind: str, at: str, waits_in: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def skip_an_exchange() -> None:  # not in programs: all that takes a class from there would count as distributed
        torch.distributed.init_process_group()
        if lagom.rank() == 1:
            time.sleep(1000)
        torch.distributed.all_reduce(torch.ones(250))

    function = skip_an_exchange if kind == "skipped" else programs.train_until_stuck
    hparams = {} if kind == "skipped" else {"kind": kind}
    with pytest.raises(StallError) as caught:
        programs.run(function, 2, hparams=hparams, batches="split", stall_timeout_s=4.0, timeout_s=8.5)
    assert caught.value.rank == 1
    said = capfd.readouterr().err
    assert re.search(rf"rank 1 made no progress for \d+ s; rank 0 waits for it in {waits_in}\n", said)
    assert at in said
    assert at in str(caught.value.__cause__)


@pytest.mark.soak_on("connect")
def test_a_killed_rank_is_named_with_its_last_words(spark: Any) -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
        programs.run(programs.be_killed, 2)
    assert "last words" in str(caught.value.__cause__)


@pytest.mark.soak_on("connect")
def test_a_killed_worker_of_spark_ends_the_run(spark: Any) -> None:
    with pytest.raises(RankError, match=r"held rank 1 on .* is gone, perhaps killed") as caught:
        programs.run(programs.kill_the_holder, 2)
    assert caught.value.rank == 1


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_sys_exit_is_an_error_with_its_status(spark: Any) -> None:
    with pytest.raises(RankError, match=r"rank 1 called sys.exit\(3\)"):
        programs.run(programs.leave, 2)


@pytest.mark.soak  # tests/program/test_payload.py and tests/driver/test_local.py show it by default
def test_what_cannot_be_pickled_is_named(spark: Any) -> None:
    lock = threading.Lock()

    def use() -> bool:
        return lock.locked()

    with pytest.raises(PayloadError, match="the variable 'lock'"):
        programs.run(use, 2)
    with pytest.raises(PayloadError, match="rank 1 returned a dict"):
        programs.run(programs.return_a_lock, 2)


def test_too_few_slots_are_found_at_once(spark: Any) -> None:
    with pytest.raises(PlanError, match="world_size is 5, but Spark has 2 task slots; ask for at most 2, or "):
        programs.run(programs.nothing, 5)


@pytest.mark.soak_on("connect")
def test_ctrl_c_ends_job_and_ranks(spark: Any, tmp_path: Path) -> None:
    sent: dict[str, Any] = {}

    def press() -> None:
        sent["pids"] = programs.pids_in(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    workers = sorted(programs.run(programs.workers_of_spark, 2).per_rank)
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        programs.run(programs.sleep_in, 2, hparams={"folder": str(tmp_path)})
    while any(programs.alive(pid) for pid in sent["pids"]) or _active_jobs(spark):
        time.sleep(0.02)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    # They were not cancelled, which ends them: the next call is as warm as if nothing had been.
    assert sorted(programs.run(programs.workers_of_spark, 2).per_rank) == workers


def _active_jobs(spark: Any) -> list[int]:
    if "connect" in type(spark).__module__:
        return []
    return list(spark.sparkContext.statusTracker().getActiveJobsIds())
