"""``lagom.worker.bootstrap``: the parts of a rank's story that need no other rank."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lagom.worker.bootstrap import _made, seeded

ROOT = Path(__file__).parents[2]


class Squares(torch.utils.data.Dataset[int]):
    """Made on the rank when it is given as a class."""

    def __getitem__(self, index: int) -> int:
        return index * index


class Callable(Squares):
    """A data set that can be called, as some are, is a data set."""

    def __call__(self) -> None:
        raise AssertionError("somebody took the data set for a factory")


def test_data_sets_are_made_where_they_are_given_as_callables() -> None:
    made = _made({"train_set": Squares, "test_set": lambda: [1, 2]})
    assert type(made["train_set"]) is Squares
    assert made["test_set"] == [1, 2]


def test_data_sets_strings_and_what_is_no_data_reach_the_function_unchanged() -> None:
    data, text, module = Callable(), "hdfs://train", Squares
    made = _made({"train_set": data, "test_set": text, "module": module})
    assert made == {"train_set": data, "test_set": text, "module": module}


def test_a_data_set_is_made_once_for_both_spellings() -> None:
    calls: list[int] = []

    def make() -> list[int]:
        calls.append(1)
        return [0]

    made = _made({"train_set": make, "test_set": make, "dataset": [make, make]})
    assert len(calls) == 2
    assert made["dataset"][0] is made["train_set"]
    assert made["dataset"][1] is made["test_set"]


def test_what_was_provided_is_not_changed() -> None:
    provided: dict[str, Any] = {"train_set": Squares, "test_set": Squares, "dataset": [Squares, Squares]}
    _made(provided)
    assert provided["dataset"] == [Squares, Squares]
    assert provided["train_set"] is Squares


@pytest.mark.usefixtures("rng_untouched")
def test_generators_are_put_back_after_an_exception() -> None:
    def fail() -> None:
        with seeded(3, None):
            torch.rand(1), random.random(), np.random.rand()
            raise KeyError

    with pytest.raises(KeyError):
        fail()


RITES = """
import os, sys, threading, time, subprocess
from lagom.worker.bootstrap import last_rites
{left}
print("printed", end="")
last_rites(lambda: os._exit(7), patience_s=0.3)
print(" ended", flush=True)
os._exit(0)
"""


def rites(left: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", RITES.format(left=left)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=30)
    return done.returncode, done.stdout, done.stderr


def test_a_process_ends_as_python_ends_one() -> None:
    left = "import atexit; atexit.register(lambda: print(' exit', end=''))"
    assert rites(left) == (0, "printed exit ended\n", "")


def test_threads_that_finish_are_waited_for_and_idle_pools_are_ended() -> None:
    left = """
import concurrent.futures
pool = concurrent.futures.ThreadPoolExecutor()
pool.submit(print, "pooled,", end=" ")
threading.Thread(target=lambda: (time.sleep(0.1), print(" threaded", end=""))).start()
time.sleep(0.05)
"""
    assert rites(left) == (0, "pooled, printed threaded ended\n", "")


@pytest.mark.parametrize(
    "left",
    [
        "threading.Thread(target=time.sleep, args=(60,), name='mine').start()",
        "import multiprocessing as m\nm.get_context('fork').Process(target=time.sleep, args=(5,), name='mine').start()",
    ],
    ids=["thread", "process"],
)
def test_what_does_not_end_by_itself_is_given_up_and_named(left: str) -> None:
    started = time.monotonic()
    code, out, err = rites(left)
    assert (code, out) == (7, "printed")
    assert "[lagom] ended what the function left running" in err
    assert "mine" in err
    assert time.monotonic() - started < 15


def test_a_process_that_failed_to_import_is_no_rank() -> None:
    assert os.environ.get("RANK") is None
