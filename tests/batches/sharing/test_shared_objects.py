"""``lagom.batches.sharing.shared_objects``: objects through which processes share memory are found, others are not."""

from __future__ import annotations

import functools
import logging
import mmap
import multiprocessing
import multiprocessing.shared_memory
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lagom.batches.sharing.shared_objects import reach_shared_memory

log = logging.getLogger(__name__)
counter = multiprocessing.Value("i")


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held

    def show(self) -> None:
        """A method, which has its object."""


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class Counting:
    def __getitem__(self, index: int) -> int:
        def count() -> None:
            counter.value += 1

        count()
        return index


class CountingInClass:
    queue = multiprocessing.SimpleQueue()  # type: ignore[var-annotated]


class Logging:
    def __getitem__(self, index: int) -> int:
        log.info("sample %d", index)
        return index


def closure(held: object) -> Callable[[], object]:
    return lambda: held


def _mapped(mode: Any, folder: Path) -> np.ndarray:
    file = folder / "numbers"
    np.zeros(8).tofile(file)
    return np.asarray(np.memmap(file, dtype=np.float64, mode=mode)).reshape(2, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: torch.zeros(3).share_memory_(),
        lambda _: multiprocessing.Array("d", 3),
        lambda _: multiprocessing.RawValue("i"),
        lambda _: np.frombuffer(multiprocessing.RawArray("d", 3)),
        lambda _: torch.zeros(3).share_memory_().numpy()[1:],
        lambda _: multiprocessing.Queue(),
        lambda _: multiprocessing.Pipe()[0],
        lambda _: multiprocessing.Event(),
        lambda _: mmap.mmap(-1, 10),
        lambda folder: _mapped("r+", folder),
        lambda _: Counting(),
        lambda _: CountingInClass(),
    ],
)
def test_shared_memory_is_found_wherever_it_is(make: Callable[[Path], Any], tmp_path: Path) -> None:
    shared = make(tmp_path)
    roots: tuple[Any, ...] = (
        shared,
        Holder([{"key": (shared,)}]),
        Slotted(shared),
        closure(shared),
        functools.partial(print, file=shared),
        Subset(Holder(shared), [1]),  # type: ignore[arg-type]
        Holder(shared).show,
        [shared].append,
    )
    for root in roots:
        assert reach_shared_memory([None, root])


def test_other_objects_share_nothing(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with (tmp_path / "closed").open("w") as file:
        pass
    roots: tuple[Any, ...] = (
        TensorDataset(torch.zeros(3)),
        Holder(np.zeros(3)[1:]),
        _mapped("r", tmp_path),
        np.frombuffer(b"12345678"),
        torch.zeros(3).numpy(),
        Logging(),
        Holder(threading.Lock()),
        file,
        endless,
        Holder(list(range(10**6))),
        np.array([None, "text"]),
    )
    for root in roots:
        assert not reach_shared_memory([root]), root


def test_a_file_that_is_open_for_writing_is_shared(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert reach_shared_memory([Holder(file)])
    with (tmp_path / "log").open() as file:
        assert not reach_shared_memory([Holder(file)])
