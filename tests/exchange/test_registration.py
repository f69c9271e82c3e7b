"""``lagom.exchange.torch_backend.registration``: the backend "lagom" gives what gloo gives."""

from __future__ import annotations

import contextlib
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lagom.exchange import shared_memory as handing
from lagom.exchange.native import native
from lagom.exchange.torch_backend.registration import register
from lagom.exchange.torch_backend.shared_group import SharedProcessGroup
from lagom.session.session import Session
from tests.ranks import run_ranks

if native() is None:
    pytest.skip("lagom was installed without its compiled part: no compiler, or no Linux", allow_module_level=True)


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


Program = Callable[[int, int], Any]
"""A function of rank and world size."""


_kept: list[Any] = []
"""Destroying a gloo group may deadlock. See Note [Kept groups] in distributed/init_process_group.py."""


def by_each(backends: tuple[str, ...], world_size: int, program: Program, timeout_s: float = 60.0) -> list[list[Any]]:
    """Run ``program`` with a default group of each backend in turn; return its values on each rank."""

    def run(session: Session) -> list[Any]:
        warnings.simplefilter("ignore")  # torch's, about names of its own
        register()
        return [over(backend, session) for backend in backends]

    def over(backend: str, session: Session) -> Any:
        store = PrefixStore(backend, session.store) if session.store is not None else dist.HashStore()
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=session.rank, world_size=world_size, timeout=timeout)
        value = program(session.rank, world_size)
        assert isinstance(dist.group.WORLD, SharedProcessGroup) == (backend == "lagom")
        dist.barrier()
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()
        return value

    return run_ranks(world_size, run, patches=False)


def by(backend: str, world_size: int, program: Program, timeout_s: float = 60.0) -> list[Any]:
    """Run ``program`` with a default group of ``backend``; return its value on each rank."""
    return [value for (value,) in by_each((backend,), world_size, program, timeout_s)]


def same(world_size: int, program: Program) -> None:
    for ours, gloos in by_each(("lagom", "gloo"), world_size, program):
        assert ours == gloos


def numbers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(rank)).double()


def collectives_of_lists_and_uneven_parts(rank: int, size: int) -> Any:
    mine = numbers(rank, 3, 5)
    together = torch.empty(size * 3, 5, dtype=mine.dtype)
    dist.all_gather_into_tensor(together, mine)
    scattered = torch.empty(3, 5, dtype=mine.dtype)
    dist.reduce_scatter_tensor(scattered, together + rank)
    parts = [torch.empty(3, 5, dtype=mine.dtype)]
    dist.reduce_scatter(parts[0], [mine + i for i in range(size)])
    uneven = torch.empty(sum((i + rank) % 3 for i in range(size)), 2)
    sizes = [(rank + i) % 3 for i in range(size)]
    dist.all_to_all_single(uneven, torch.arange(2.0 * sum(sizes)).view(-1, 2) + 100 * rank, sizes, sizes)
    turned = [torch.empty(4) for _ in range(size)]
    dist.all_to_all(turned, [torch.full((4,), float(rank + 10 * i)) for i in range(size)])
    return [tensor.tolist() for tensor in (together, scattered, *parts, uneven, *turned)]


def objects_and_groups(rank: int, size: int) -> Any:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 1000 * rank})
    told = [rank * 2, None]
    dist.broadcast_object_list(told, size - 1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [[i] for i in range(size)] if rank == 0 else [None] * size, 0)
    half = dist.new_group([0, size - 1])
    total = torch.ones(3) * (rank + 1)
    if rank in (0, size - 1):
        dist.all_reduce(total, group=half)
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    tensors = [torch.full((50_000,), float(rank + i)) for i in range(8)]
    # Under way at once, waited for in another order, begun in another order on the ranks.
    order = [0, 1] if rank else [1, 0]
    works = [dist.all_reduce(tensors[2 * i + k], group=groups[k], async_op=True) for i in range(4) for k in order]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors[:3]:
            dist.all_reduce(tensor)
    return everyone, told, mine, total.tolist(), [tensor.sum().item() for tensor in tensors]


def messages(rank: int, size: int) -> Any:
    after, before = (rank + 1) % size, (rank - 1) % size
    sent, got = torch.full((70_000,), float(rank)), torch.empty(70_000)
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, sent, after)])
    for work in works:
        work.wait()
    small = torch.zeros(3, dtype=torch.int64)
    sending = dist.isend(torch.full((3,), rank), after)
    assert sending is not None
    source = dist.recv(small)
    sending.wait()
    return got.sum().item(), source, small.tolist()


def trained(rank: int, size: int) -> Any:
    # In the ranks only: it compiles functions, and lagom postpones no averages where something is compiled.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=generator, dtype=torch.float64)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 1)
        return nn.Sequential(*layers).double()

    found = []
    wrapped = nn.parallel.DistributedDataParallel(made())
    steps(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    found += [parameter.detach() for parameter in wrapped.parameters()]
    wrapped = nn.parallel.DistributedDataParallel(made(), bucket_cap_mb=1)
    steps(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))
    found += [parameter.detach() for parameter in wrapped.parameters()]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 30), nn.Linear(30, 1)).double()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return found + [one.full_tensor().detach() for one in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 3]
)
def test_collectives_of_lists_and_uneven_parts_give_what_gloo_gives(world_size: int) -> None:
    same(world_size, collectives_of_lists_and_uneven_parts)


def test_objects_subgroups_and_works_under_way_at_once() -> None:
    same(3, objects_and_groups)


def test_messages_between_two_ranks() -> None:
    same(3, messages)


@pytest.mark.soak  # test_hosts.py has DDP by default, and tests/distributed/test_init_process_group.py FSDP2
@pytest.mark.parametrize("world_size", [2, 3])  # of three ranks parts are uneven
def test_ddp_fsdp2_and_zero_redundancy_end_with_gloos_weights(world_size: int) -> None:
    for ours, gloos in by_each(("lagom", "gloo"), world_size, trained):
        torch.testing.assert_close(ours, gloos, rtol=1e-10, atol=1e-12)


@pytest.mark.soak  # tests/distributed/test_init_process_group.py has meshes, which call these
def test_functional_collectives() -> None:
    def program(rank: int, size: int) -> Any:
        world = dist.group.WORLD
        assert world is not None
        found = [
            functional.all_reduce(torch.ones(4) * (rank + 1), "sum", world),
            functional.all_gather_tensor(torch.ones(2) * rank, 0, world),
            functional.reduce_scatter_tensor(torch.arange(2.0 * size), "sum", 0, world),
            functional.all_to_all_single(torch.arange(2.0 * size) + rank * 100, None, None, world),
        ]
        return [one.tolist() for one in found]

    same(3, program)


def test_errors_come_out_of_the_call_or_the_work_on_all_ranks() -> None:
    def at_once(rank: int, size: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(3 + rank))
        return str(caught.value)

    def later(rank: int, size: int) -> str:
        work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        with pytest.raises(RuntimeError):
            work.get_future().wait()
        assert not work.is_success()
        return str(caught.value)

    wanted = (
        "the ranks call different things: rank 0 all_reduce (sum) of 3 float32, rank 1 all_reduce (sum) of 4 float32"
    )
    for program in (at_once, later):

        def run(session: Session, program: Program = program) -> Any:
            register()
            assert session.store is not None
            dist.init_process_group("lagom", store=session.store, rank=session.rank, world_size=2)
            return program(session.rank, 2)

        assert run_ranks(2, run, patches=False) == [wanted] * 2


def test_without_the_compiled_part_on_a_rank_the_group_is_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> Any:
        if session.rank == 1:
            monkeypatch.setattr(handing, "native", lambda: None)
        register()
        dist.init_process_group("lagom", store=session.store, rank=session.rank, world_size=2)
        one = torch.ones(3)
        dist.all_reduce(one)
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        model(one).sum().backward()
        dist.barrier()
        return one.tolist(), isinstance(dist.group.WORLD, SharedProcessGroup)

    assert run_ranks(2, run, patches=False) == [([2.0] * 3, False)] * 2


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("home", [pytest.param("one host", marks=pytest.mark.soak), "host {}"])
def test_ranks_meet_at_an_address_of_ipv6(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> list[float]:
        monkeypatch.setenv("MASTER_ADDR", "::1")
        monkeypatch.setattr(handing, "home", lambda: home.format(session.rank))
        register()
        dist.init_process_group("lagom", store=session.store, rank=session.rank, world_size=2)
        one = torch.ones(3)
        dist.all_reduce(one)
        dist.barrier()
        return one.tolist()

    assert run_ranks(2, run, patches=False) == [[2.0] * 3] * 2
