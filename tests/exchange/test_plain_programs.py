"""``lagom.exchange.torch_backend``: what programs do with groups, over the backend "lagom" as over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn

from tests.exchange.test_registration import by, same
from tests.ranks import RankFailedError

WORLDS = (2, pytest.param(3, marks=pytest.mark.soak))


def groups_come_and_go(rank: int, size: int) -> Any:
    found, first = [], dist.new_group(list(range(size)))
    for i in range(3):
        group = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            total = torch.full((5,), float(rank + i))
            dist.all_reduce(total, group=group)
            dist.destroy_process_group(group)
            found.append(total.tolist())
        assert first.group_name == "1"
    alone = [dist.new_group([i]) for i in range(size)][rank]
    mine = torch.ones(2) * rank
    dist.all_reduce(mine, group=alone)
    dist.destroy_process_group(alone)
    dist.all_reduce(mine, group=first)
    return [*found, mine.tolist(), len(dist.distributed_c10d._world.pg_map)]


def odd_tensors(rank: int, size: int) -> Any:
    """A parameter that does not lie in order; lists of all sizes; a view that is the negative of what lies there."""
    parameter = nn.Parameter((torch.arange(12.0).view(3, 4) * (rank + 1)).t())
    dist.broadcast(parameter, size - 1)
    dist.all_reduce(parameter)
    part = torch.empty(2 * rank, 3)
    lists = [torch.full((2 * i, 3), float(rank + 10 * i)) for i in range(size)]
    dist.reduce_scatter(part, lists)
    largest = torch.zeros(1 + 70_000 * rank)
    whole = [torch.arange(1.0 + 70_000 * i) * (rank - 1) for i in range(size)]  # in several pieces
    dist.reduce_scatter(largest, whole, op=dist.ReduceOp.MAX)
    rows = [torch.empty(1) for _ in range(size)]
    dist.all_gather(rows, torch.tensor([1.0 + 2j * rank]).conj().imag)
    return [parameter.tolist(), part.tolist(), largest.sum().item(), torch.cat(rows).tolist()]


def checkpoint_in_the_background(rank: int, size: int) -> Any:
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder, 0)
        assert dist.group.WORLD is not None
        devices = {device.type for device in dist.group.WORLD._device_types}
        saving = checkpoints.async_save({f"of {rank}": torch.arange(4.0) + rank}, checkpoint_id=folder[0])
        assert isinstance(saving, Future)
        saving.result()
        loaded = {f"of {i}": torch.zeros(4) for i in range(size)}
        checkpoints.load(loaded, checkpoint_id=folder[0])
        dist.barrier()
    return "cpu" in devices, {name: tensor.tolist() for name, tensor in loaded.items()}


@pytest.mark.parametrize("world_size", WORLDS)
def test_groups_that_come_and_go_and_odd_tensors_are_as_over_gloo(world_size: int) -> None:
    def program(rank: int, size: int) -> Any:
        return groups_come_and_go(rank, size), odd_tensors(rank, size)

    same(world_size, program)


@pytest.mark.soak
def test_torchs_checkpoints_are_written_in_the_background() -> None:
    same(2, checkpoint_in_the_background)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_was_called_for_is_done_before_a_group_goes(world_size: int) -> None:
    def program(rank: int, size: int) -> Any:
        group = dist.new_group(list(range(size)))
        tensors = [torch.full((500_000,), float(rank + i)) for i in range(6)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        dist.destroy_process_group(group)
        assert all(work.wait() for work in works)
        return [tensor.unique().tolist() for tensor in tensors]

    wanted = [[float(sum(range(world_size)) + i * world_size)] for i in range(6)]
    assert by("lagom", world_size, program) == [wanted] * world_size


def sparse_on_one(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(4).to_sparse() if rank else torch.ones(4))


def other_lists(rank: int, size: int) -> None:
    sizes = [1, 2] if rank else [2, 1]
    dist.reduce_scatter(torch.zeros(sizes[rank]), [torch.ones(one) for one in sizes])


def other_calls_over_gloo(rank: int, size: int) -> None:
    tensor = torch.ones(4).to_sparse()
    dist.all_reduce(tensor) if rank else dist.broadcast(tensor, 0)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (sparse_on_one, r"rank 0 all_reduce \(sum\) of 4 float32, rank 1 exchange"),
        (other_lists, r"rank 0 reduce_scatter \(sum\) of \[2, 1\] torch.float32, rank 1 .* of \[1, 2\] torch.float32"),
        (other_calls_over_gloo, r"rank 0 broadcast over gloo, rank 1 all_reduce over gloo"),
    ],
)
def test_ranks_that_differ_where_memory_does_not_carry_it_are_an_error(program: Any, words: str) -> None:
    with pytest.raises(RankFailedError, match=f"call different things: {words}"):
        by("lagom", 2, program, timeout_s=600)


def moves(rank: int, kind: torch.dtype, group: Any = None) -> dict[str, Callable[[], object]]:
    """Each way to move 4 numbers, on 2 ranks."""
    four, rows = torch.ones(4, dtype=kind), [torch.zeros(4, dtype=kind) for _ in range(2)]
    on_root = rows if rank == 0 else None
    return {
        "broadcast of 16 bytes": lambda: dist.broadcast(four, 0, group),
        "all_gather of 16 bytes": lambda: dist.all_gather(rows, four, group),
        "all_gather of 16 bytes ": lambda: dist.all_gather_into_tensor(torch.zeros(8, dtype=kind), four, group),
        "gather of 16 bytes": lambda: dist.gather(four, on_root, 0, group),
        "scatter of 16 bytes": lambda: dist.scatter(four, on_root, 0, group),
        "all_to_all": lambda: dist.all_to_all_single(four.clone(), four, group=group),
        "all_to_all ": lambda: dist.all_to_all(rows, rows, group),
    }


def test_ranks_that_move_numbers_of_other_types_are_an_error_that_names_both() -> None:
    def program(rank: int, size: int) -> list[str]:
        said = []
        for name in moves(rank, torch.float32):
            call = moves(rank, torch.int32 if rank else torch.float32, dist.new_group([0, 1]))[name]
            with pytest.raises(RuntimeError) as caught:
                call()
            said.append(str(caught.value).replace(" with root 0", ""))
        return said

    names = [name.strip() for name in moves(0, torch.float32)]
    wanted = [f"the ranks call different things: rank 0 {one} of float32, rank 1 {one} of int32" for one in names]
    assert by("lagom", 2, program) == [wanted] * 2
