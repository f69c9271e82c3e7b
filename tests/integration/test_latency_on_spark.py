"""Seconds that failures take on every kind of Spark, on a machine that does nothing else meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lagom.errors import PlanError, RankError
from tests.integration import programs

pytestmark = [
    pytest.mark.soak,
    pytest.mark.latency,
    pytest.mark.parametrize(
        "spark", ["local[2]", "local-cluster", "standalone", "connect"], indirect=True, scope="session"
    ),
]


@pytest.fixture(autouse=True)
def warm(spark: Any) -> None:
    """Run once, so that Spark has its workers."""
    programs.run(programs.nothing, 2)


def test_an_error_is_here_within_3_s(spark: Any) -> None:
    with pytest.raises(programs.LateError, match="the disk is full") as caught:
        programs.run(programs.raise_while_the_other_sleeps, 2)
    assert time.time() - caught.value.at < 3
    with pytest.raises(programs.LateError, match="a bad sample") as caught:
        programs.run(programs.raise_while_the_other_reduces, 2, module=programs.Net, train_set=programs.points())
    assert time.time() - caught.value.at < 3


def test_a_killed_rank_ends_the_run_within_5_s(spark: Any) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        programs.run(programs.be_killed, 2)
    assert time.monotonic() - start < 5


def test_too_few_slots_are_found_within_2_s(spark: Any) -> None:
    start = time.monotonic()
    with pytest.raises(PlanError, match="world_size is 5"):
        programs.run(programs.nothing, 5)
    assert time.monotonic() - start < 2


def test_ctrl_c_ends_the_ranks_within_2_s(spark: Any, tmp_path: Path) -> None:
    sent: dict[str, Any] = {}

    def press() -> None:
        sent["pids"] = programs.pids_in(tmp_path, 2)
        sent["at"] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        programs.run(programs.sleep_in, 2, hparams={"folder": str(tmp_path)})
    while any(programs.alive(pid) for pid in sent["pids"]):
        assert time.monotonic() - sent["at"] < 2
        time.sleep(0.02)
    thread.join()
