"""``softly_terminated`` and SIGTERM in the process of the driver: forks, inline runs, and the program's own handler."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.driver.termination import softly_terminated
from lagom.errors import Terminated

PATIENCE_S = 60.0


def sleeping() -> None:
    """Wait longer than the test."""
    time.sleep(PATIENCE_S)


def end_of_terminated_fork() -> int | None:
    """Return how a fork ends that waits, and gets SIGTERM."""
    child = multiprocessing.get_context("fork").Process(target=sleeping)
    child.start()
    time.sleep(0.2)
    child.terminate()
    child.join(PATIENCE_S / 10)
    found = child.exitcode
    child.kill()
    child.join()
    return found


def test_sigterm_ends_the_forks_of_the_driver() -> None:
    with softly_terminated(lambda: True):
        assert end_of_terminated_fork() == -signal.SIGTERM


def test_a_handler_that_the_program_sets_during_the_run_stays() -> None:
    def own(*_: Any) -> None:
        pass

    try:
        with softly_terminated(lambda: True):
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_has_its_default_in_an_inline_run() -> None:
    threads = threading.active_count()

    def look() -> list[Any]:
        is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return [is_default, threading.active_count(), end_of_terminated_fork()]

    config = TorchDistributedConfig(launcher="inline", world_size=1, run_dir=None)
    assert experiment.lagom(look, config).value == [True, threads, -signal.SIGTERM]


def test_the_handler_is_removed_also_if_a_second_sigterm_comes_while_the_ranks_end() -> None:
    entered, left = threading.Event(), threading.Event()

    def leave() -> bool:
        entered.set()
        left.wait(PATIENCE_S)
        return True

    def send_second() -> None:
        entered.wait(PATIENCE_S)
        time.sleep(1.2)  # so that this is no repetition of the first
        os.kill(os.getpid(), signal.SIGTERM)
        left.set()

    sender = threading.Thread(target=send_second)
    sender.start()
    with pytest.raises(Terminated), softly_terminated(leave):
        os.kill(os.getpid(), signal.SIGTERM)
    sender.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
