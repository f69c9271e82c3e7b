"""Threads of a program that train: in turns they are right, at once they are an error that says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, run_ranks


def _make_step() -> tuple[nn.Linear, Callable[[], None]]:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1).double(), torch.randn(4, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()

    return model, step


def test_threads_that_train_at_once_are_an_error_also_where_nobody_looks_at_a_thread() -> None:
    def program(session: Session) -> None:
        (_model, step), (_other, other_step) = _make_step(), _make_step()
        trained, ended = threading.Event(), threading.Event()

        def train() -> None:
            step()
            trained.set()
            while not ended.is_set():  # at work
                time.sleep(0.001)

        def train_too() -> None:
            try:
                other_step()
            finally:
                ended.set()

        first, second = threading.Thread(target=train, name="first"), threading.Thread(target=train_too, name="second")
        first.start()
        trained.wait()
        second.start()
        first.join()
        second.join()
        assert session.backwards.divergence is not None
        assert session.backwards.agreement is not None
        session.backwards.divergence.check_end(session.backwards.agreement)

    with pytest.raises(RankFailedError, match=r"went on, .*: two threads of the program train at the same time"):
        run_ranks(2, program, batches="whole")


def test_threads_that_wait_for_each_other_train_in_turns() -> None:
    def program(_: Session) -> torch.Tensor:
        model, step = _make_step()
        with ThreadPoolExecutor(1) as pool:
            for _turn in range(4):
                pool.submit(step).result()
                step()
        return model.weight.detach()

    wanted = alone(program)
    for found in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
