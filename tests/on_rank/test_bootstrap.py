"""``lagom.on_rank.bootstrap``: the parts of a rank's story that need no other rank."""

from __future__ import annotations

import atexit
import contextlib
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

from lagom.on_rank.bootstrap import MadeArguments, run_exit_handlers, seeded
from lagom.program.signature import arguments


class Squares(torch.utils.data.Dataset[int]):
    """Made on the rank when it is given as a class."""

    def __getitem__(self, index: int) -> int:
        return index * index


class Called(Squares):
    """A data set that can be called, as some are, is a data set."""

    def __call__(self) -> None:
        raise AssertionError("somebody took the data set for a factory")


def test_data_sets_strings_and_what_is_no_data_reach_the_function_unchanged() -> None:
    data, text, module = Called(), "hdfs://train", Squares
    made = MadeArguments({"train_set": data, "test_set": text, "module": module})
    assert dict(made) == {"train_set": data, "test_set": text, "module": module}


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


@pytest.mark.parametrize("kind", [threading.Thread, multiprocessing.get_context("fork").Process])
def test_what_does_not_end_by_itself_is_given_up_and_named(kind: Any, tmp_path: Path) -> None:
    code, out = rites(lambda: kind(target=time.sleep, args=(1000,), name="mine").start(), tmp_path / "out")
    assert code == 7
    assert out == "printed[lagom] ended what the function left running 0.3 s after it returned: mine\n"
