"""``reused_arrays`` and ``prefetch``: memory is used again only when nobody has it, and threads end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lagom.extensions.data.column_types.reused_arrays import ReusedArrays
from lagom.extensions.data.parquet.prefetch import Prefetcher


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    memory = ReusedArrays()
    shape, dtype = (1000,), np.dtype(np.float32)
    first = memory.empty(shape, dtype)
    address = first.ctypes.data
    tensor = torch.from_numpy(first[10:20])
    del first
    second = memory.empty(shape, dtype)
    assert second.ctypes.data != address  # a tensor still has it
    view = tensor[2:3]
    del tensor
    assert memory.empty(shape, dtype).ctypes.data not in (address, second.ctypes.data)
    del view
    again = memory.empty((10, 50), np.dtype(np.float64))
    assert again.nbytes == 4000
    assert again.shape == (10, 50)
    found = {memory.empty(shape, dtype).ctypes.data, again.ctypes.data}
    assert address in found


def test_memory_that_is_much_too_large_is_given_back() -> None:
    memory = ReusedArrays()
    large = weakref.ref(memory.empty((100_000,), np.dtype(np.int64)).base)
    assert large() is not None
    memory.empty((10,), np.dtype(np.int64))
    assert large() is None


def test_what_is_drawn_ahead_comes_in_order_and_so_does_an_error() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("six")

    ahead = Prefetcher(items(), 2)
    assert [next(ahead) for _ in range(5)] == list(range(5))
    for _ in range(2):
        with pytest.raises(KeyError, match="six"):
            next(ahead)
    ahead.close()


def test_who_draws_from_what_was_closed_gets_an_error() -> None:
    ahead = Prefetcher(iter(range(9)), 2)
    assert next(ahead) == 0
    ahead.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="the data set was closed while it was read"):
            next(ahead)


def test_a_thread_ends_when_nobody_draws_any_more() -> None:
    drawn = []

    def items() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            yield number

    before = set(threading.enumerate())
    ahead = Prefetcher(items(), 3)
    assert next(ahead) == 0
    (thread,) = set(threading.enumerate()) - before
    del ahead
    gc.collect()
    thread.join()
    assert len(drawn) <= 5


_LEFT = """
import os, time
from lagom.extensions.data.parquet.prefetch import Prefetcher

def items():
    yield 1
    time.sleep(0.5)  # as Arrow reads, without the interpreter
    os.write(1, b"read")
    yield 2

next(Prefetcher(items(), 2))
ahead = Prefetcher(items(), 2)
next(ahead)
"""


def test_the_end_of_a_process_waits_for_what_is_being_read() -> None:
    """A thread that came back from Arrow to an interpreter that is gone would abort the process."""
    done = subprocess.run([sys.executable, "-c", _LEFT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "readread", "")
