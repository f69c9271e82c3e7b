"""``lagom.worker.bootstrap``: the parts of a rank's story that need no other rank."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lagom.program.signature import arguments
from lagom.worker.bootstrap import MadeArguments, run_exit_handlers, seeded


class Squares(torch.utils.data.Dataset[int]):
    """Made on the rank when it is given as a class."""

    def __getitem__(self, index: int) -> int:
        return index * index


class Called(Squares):
    """A data set that can be called, as some are, is a data set."""

    def __call__(self) -> None:
        raise AssertionError("somebody took the data set for a factory")


def test_data_sets_are_made_where_they_are_given_as_callables() -> None:
    made = MadeArguments({"train_set": Squares, "test_set": lambda: [1, 2]})
    assert type(made["train_set"]) is Squares
    assert made["test_set"] == [1, 2]


def test_data_sets_strings_and_what_is_no_data_reach_the_function_unchanged() -> None:
    data, text, module = Called(), "hdfs://train", Squares
    made = MadeArguments({"train_set": data, "test_set": text, "module": module})
    assert dict(made) == {"train_set": data, "test_set": text, "module": module}


def test_a_data_set_is_made_once_for_both_spellings() -> None:
    calls: list[int] = []

    def make() -> list[int]:
        calls.append(1)
        return [0]

    made = MadeArguments({"train_set": make, "test_set": make, "dataset": [make, make]})
    assert len(made["dataset"]) == len(calls) == 2
    assert made["dataset"][0] is made["train_set"]
    assert made["dataset"][1] is made["test_set"]


def test_a_data_set_that_the_function_does_not_name_is_not_made() -> None:
    def make() -> None:
        raise AssertionError("nobody asked for it")

    made = MadeArguments({"train_set": [1], "test_set": make, "hparams": {}})
    assert arguments(lambda train_set: None, made) == ([], {"train_set": [1]})


@pytest.mark.usefixtures("rng_untouched")
def test_generators_are_put_back_after_an_exception() -> None:
    def fail() -> None:
        with seeded(3, None):
            torch.rand(1), random.random(), np.random.rand()
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def rites(left: Callable[[], Any], path: Path) -> tuple[int, str]:
    """Exit status and output of a process that has ``left`` something running and ends as a rank does."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        atexit._clear()
        file = os.open(path, os.O_CREAT | os.O_WRONLY)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            os.dup2(file, fd)
            setattr(sys, name, open(fd, "w", closefd=False))  # noqa: SIM115
        left()
        print("printed", end="")
        run_exit_handlers(lambda: os._exit(7), patience_s=0.3)
        print(" ended", end="", flush=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code, path.read_text()


def test_a_process_ends_as_python_ends_one(tmp_path: Path) -> None:
    def left() -> None:
        atexit.register(print, " at exit", end="")

    assert rites(left, tmp_path / "out") == (0, "printed at exit ended")


def test_threads_that_finish_are_waited_for_and_idle_pools_are_ended(tmp_path: Path) -> None:
    def left() -> None:
        concurrent.futures.ThreadPoolExecutor().submit(int)
        threading.Timer(0.1, print, [" threaded"], {"end": ""}).start()

    assert rites(left, tmp_path / "out") == (0, "printed threaded ended")


def test_what_c_code_printed_is_written_out(tmp_path: Path) -> None:
    def left() -> None:
        ctypes.CDLL(None).printf(b"from C ")

    code, out = rites(left, tmp_path / "out")
    assert code == 0
    assert "from C " in out


@pytest.mark.parametrize("kind", [threading.Thread, multiprocessing.get_context("fork").Process])
def test_what_does_not_end_by_itself_is_given_up_and_named(kind: Any, tmp_path: Path) -> None:
    code, out = rites(lambda: kind(target=time.sleep, args=(1000,), name="mine").start(), tmp_path / "out")
    assert code == 7
    assert out == "printed[lagom] ended what the function left running 0.3 s after it returned: mine\n"
