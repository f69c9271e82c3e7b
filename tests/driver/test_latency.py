"""Seconds that calls and failures take on this machine, which must do nothing else meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError

pytestmark = [pytest.mark.soak, pytest.mark.latency]


def run(function: Callable[..., Any], world_size: int = 2) -> Any:
    """Run ``function`` on ranks of this machine."""
    return experiment.lagom(function, TorchDistributedConfig(launcher="local", world_size=world_size, max_failures=0))


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    """Start the fork server."""
    run(lambda: None)


def test_a_second_call_takes_less_than_2_s() -> None:
    start = time.monotonic()
    run(lambda: None)
    assert time.monotonic() - start < 2


def test_an_exception_is_here_within_a_second_while_others_sit_in_a_collective() -> None:
    def train() -> None:
        model = torch.nn.Linear(2, 1)
        if lagom.rank() == 1:
            time.sleep(0.5)
            raise ValueError(repr(time.time()))
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()

    with pytest.raises(ValueError, match=r"\d+") as raised:
        run(train)
    assert time.time() - float(str(raised.value)) < 1.0


@pytest.mark.parametrize("status", [0, 4, -signal.SIGKILL])
def test_a_rank_that_ends_is_an_error_within_a_second(status: int) -> None:
    def train() -> None:
        if lagom.rank() == 1:
            os._exit(status) if status >= 0 else os.kill(os.getpid(), -status)
        time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1"):
        run(train)
    assert time.monotonic() - start < 1.5  # with the start of the run
