"""``lagom.batches.sharing.shared_objects``: memory that processes share is found, wherever the program keeps it."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lagom.batches.sharing.shared_objects import SharedMappings
from lagom.session.session import Session
from tests.ranks import alone


@pytest.mark.parametrize(
    "make",
    [
        lambda _: torch.zeros(3).share_memory_(),
        lambda _: multiprocessing.get_context("fork").RawArray("d", 100_000),
        lambda _: mmap.mmap(-1, 10),
        lambda folder: np.memmap(folder / "numbers", dtype=np.float64, mode="w+", shape=(8,)),
    ],
)
def test_new_shared_memory_is_found(make: Callable[[Path], Any], tmp_path: Path) -> None:
    mappings = SharedMappings()
    assert not mappings.has_new()
    shared = make(tmp_path)
    assert mappings.has_new()
    assert not SharedMappings().has_new()
    del shared


def test_other_memory_is_not() -> None:
    def hold(session: Session) -> tuple[bool, int]:
        mappings = SharedMappings()
        batches: DataLoader[Any] = DataLoader(range(4), 2, num_workers=1)  # type: ignore[arg-type]
        held = [multiprocessing.RLock(), torch.zeros(1_000_000), *batches]
        return mappings.has_new(), len(held)

    assert alone(hold) == (False, 4)
