"""Programs that start their own ranks."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

from lagom.errors import LagomError
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import RankFailedError, run_ranks, session_alone


def worker(rank: int, world_size: int, found: list[Any]) -> None:
    """A rank of a program for one machine."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number)
    found.append((rank, number.item()))
    dist.destroy_process_group()


def failing(rank: int) -> None:
    """Fails on one rank."""
    dist.init_process_group("gloo")
    if rank == 1:
        raise FileNotFoundError("of rank 1")


def prepare(index: int, folder: str) -> None:
    """No rank of anything."""
    os.system(f"touch {folder}/{os.getppid()}-{index}")  # on the real disk: that of its rank is dropped at the end


def spawning(_: Session) -> list[Any]:
    found: list[Any] = []
    mp.spawn(worker, args=(2, found), nprocs=2, join=True)
    return found


def test_spawned_ranks_are_lagoms() -> None:
    assert run_ranks(2, spawning) == [[(0, 3.0)], [(1, 3.0)]]


@pytest.mark.soak  # test_init_process_group.py has what a rank raises that has joined
def test_what_a_spawned_rank_raises_keeps_its_type() -> None:
    with pytest.raises(RankFailedError, match="FileNotFoundError: of rank 1"):
        run_ranks(2, lambda _: mp.spawn(failing, nprocs=2))


def test_another_number_of_ranks_is_an_error_that_names_it() -> None:
    with pytest.raises(RankFailedError, match=r"2 processes by torch.*run it with world_size=2"):
        run_ranks(3, spawning)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_ranks_started_one_by_one_are_an_error(method: str) -> None:
    def program(_: Session) -> None:
        context: Any = multiprocessing.get_context(method)
        context.Process(target=worker, args=(0, 2, [])).start()

    with pytest.raises(RankFailedError, match="starts ranks of its own, processes by multiprocessing"):
        run_ranks(2, program)


def test_other_processes_are_started_as_written(tmp_path: Path) -> None:
    def program(_: Session) -> None:
        mp.start_processes(prepare, args=(str(tmp_path),), nprocs=2, start_method="fork")
        process = multiprocessing.get_context("fork").Process(target=prepare, args=(2, str(tmp_path)))
        process.start()
        process.join()

    run_ranks(2, program)
    assert sorted(path.name.partition("-")[2] for path in tmp_path.iterdir()) == ["0", "0", "1", "1", "2", "2"]


def test_at_world_size_1_and_afterwards_spawn_is_torchs(tmp_path: Path) -> None:
    original, start = mp.spawn, multiprocessing.Process.start
    with patched(session_alone(tmp_path)):
        assert mp.spawn is original

    def program(session: Session) -> bool:
        with patched(session):
            assert mp.spawn is not original
        return mp.spawn is original and multiprocessing.Process.start is start

    assert run_ranks(2, program, patches=False) == [True, True]


def test_what_a_spawned_worker_cannot_find_in_main_is_told_with_a_remedy() -> None:
    def run(session: Session) -> str:
        data = type("Data", (list,), {"__module__": "__main__"})([1, 2])
        with pytest.raises(LagomError, match="Define it in a module that is imported") as caught:
            list(DataLoader(data, num_workers=1, multiprocessing_context="spawn"))
        return str(caught.value)

    assert all("__main__.Data" in text for text in run_ranks(2, run))
