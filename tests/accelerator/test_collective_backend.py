"""The double of NCCL takes what NCCL takes, and shows what NCCL leaves undefined."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lagom.exchange.group import Group
from lagom.exchange.run_store import SealedStore, all_gather_by
from tests.accelerator.device_processes import needs_device, on_devices
from tests.gpu.test_cuda import averager, check_buckets_leave_early
from tests.ranks import gloo

pytestmark = needs_device

_LIMIT = timedelta(seconds=0.3)
"""For exchanges that never end; others take as long as they need."""


def communicator(rank: int, store: dist.Store, size: int, name: str = "one") -> Any:
    from tests.accelerator.collective_backend import Communicator

    return Communicator(dist.PrefixStore(name, store), rank, size, timedelta(seconds=60))


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def exchanges(rank: int, store: dist.Store) -> dict[str, Any]:
    size, here = 4, torch.device("lagomtest", rank)
    group = communicator(rank, store, size)
    mine = torch.arange(8.0, device=here) + rank
    found = {}

    def keep(name: str, work: Any, out: torch.Tensor) -> None:
        work.wait()
        found[name] = out.tolist()

    out = mine.clone()
    keep("all_reduce", group.allreduce([out]), out)
    out = mine.bfloat16()
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    keep("max", group.allreduce([out], options), out)
    out = mine.clone()
    keep("broadcast", group.broadcast(out, 2), out)
    out = torch.empty(32, device=here)
    keep("all_gather", group.all_gather_single(out, mine), out)
    out = torch.empty(2, device=here)
    keep("reduce_scatter", group.reduce_scatter_single(out, mine), out)
    out = torch.empty(4, 2, device=here)
    keep("all_to_all", group.alltoall_base(out, mine.reshape(4, 2), [], []), out)
    out = torch.empty(4 * rank, device=here)
    keep("uneven", group.alltoall_base(out, torch.full((6,), float(rank), device=here), [rank] * 4, [0, 1, 2, 3]), out)
    group.barrier()
    group.shutdown()
    return found


def test_exchanges_give_what_they_shall() -> None:
    mine = [[float(i + rank) for i in range(8)] for rank in range(4)]
    for rank, found in enumerate(on_devices(4, exchanges)):
        total = [sum(parts) for parts in zip(*mine, strict=True)]
        assert found["all_reduce"] == total
        assert found["max"] == mine[3]
        assert found["broadcast"] == mine[2]
        assert found["all_gather"] == [value for part in mine for value in part]
        assert found["reduce_scatter"] == total[2 * rank : 2 * rank + 2]
        assert found["all_to_all"] == [part[2 * rank : 2 * rank + 2] for part in mine]
        assert found["uneven"] == [float(other) for other in range(4) for _ in range(rank)]


def unwaited(rank: int, store: dist.Store) -> dict[str, Any]:
    module, here = torch.get_device_module("lagomtest"), torch.device("lagomtest", rank)
    group, side = communicator(rank, store, 2), module.Stream()
    x, counts = torch.ones(3, device=here), torch.ones(3, dtype=torch.int64, device=here)
    works = [group.allreduce([x]), group.allreduce([counts])]
    found: dict[str, Any] = {"nan": x.isnan().all().item(), "counts": counts.tolist()}
    x.fill_(7)  # before the exchange has ended
    works[0].wait()
    found["on a stream that does not wait"] = None
    with module.stream(side):
        found["on a stream that does not wait"] = x.tolist()
    found["after wait"] = x.tolist()
    module.synchronize()
    found["synchronized"] = counts.tolist()
    late = torch.full((2,), float(rank), device=here)
    work = group.allreduce([late])
    late += 10  # not sent
    work.wait()
    found["changed too late"] = late.tolist()
    pair = torch.full((2,), float(rank), device=here)
    group.broadcast(pair, 1)
    group.allreduce([pair]).wait()  # after the broadcast, on the communicator's own stream
    found["in order"] = pair.tolist()
    work = group.allreduce([pair])
    while not work.is_completed():
        time.sleep(0.001)
    found["completed"] = pair.tolist()
    group.shutdown()
    return found


def test_an_output_is_not_there_before_a_stream_has_waited() -> None:
    for found in on_devices(2, unwaited):
        assert found == {
            "nan": True,
            "counts": [torch.iinfo(torch.int64).max] * 3,
            "on a stream that does not wait": [7, 7, 7],
            "after wait": [2, 2, 2],
            "synchronized": [2, 2, 2],
            "changed too late": [1, 1],
            "in order": [2, 2],
            "completed": [4, 4],
        }


def refused(rank: int, store: dist.Store) -> list[tuple[str, str]]:
    group = communicator(rank, store, 2)
    x = torch.ones(4, 4, device=torch.device("lagomtest", rank))
    return [
        error_of(lambda: group.allreduce([torch.ones(3)])),
        error_of(lambda: group.allreduce([x.t()[:2]])),
        error_of(lambda: group.all_gather_single(torch.empty(4, device=x.device), x)),
    ]


def test_tensors_that_nccl_refuses_are_refused() -> None:
    for found in on_devices(2, refused):
        assert [kind for kind, _ in found] == ["ValueError"] * 3
        assert "Tensors must be lagomtest and dense" in found[0][1]
        assert "Tensors must be contiguous" in found[1][1]
        assert "output tensor size is not" in found[2][1]


def shared_device(rank: int, store: dist.Store) -> tuple[str, str]:
    group = communicator(rank, store, 2)
    return error_of(lambda: group.allreduce([torch.ones(3, device="lagomtest")]))


def test_two_ranks_on_one_device_are_refused() -> None:
    for kind, text in on_devices(2, shared_device, num_devices=1):
        assert kind == "DistBackendError"
        assert "Duplicate GPU detected" in text


def unlike(what: str, rank: int, store: dist.Store) -> tuple[str, str]:
    group = communicator(rank, store, 2)
    here = torch.device("lagomtest", rank)
    group.allreduce([torch.ones(3, device=here)])
    group.set_timeout(_LIMIT)
    UNLIKE[what](group, rank, here)
    return error_of(torch.get_device_module("lagomtest").synchronize)


_TYPES = (torch.float16, torch.bfloat16)
UNLIKE: dict[str, Callable[[Any, int, torch.device], Any]] = {
    "size": lambda group, rank, here: group.allreduce([torch.ones(3 + rank, device=here)]).wait(),
    "type": lambda group, rank, here: group.allreduce([torch.ones(4, device=here).to(_TYPES[rank])]).wait(),
    "operation": lambda group, rank, here: (
        group.allreduce([torch.ones(4, device=here)]) if rank else group.broadcast(torch.ones(4, device=here), 0)
    ).wait(),
    "root": lambda group, rank, here: group.broadcast(torch.ones(4, device=here), rank).wait(),
    "number": lambda group, rank, here: rank == 0 and group.allreduce([torch.ones(4, device=here)]).wait(),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_exchanges_that_do_not_fit_last_until_the_time_limit(what: str) -> None:
    found = on_devices(2, partial(unlike, what))
    for kind, text in found[: 1 if what == "number" else 2]:  # the other rank has ended
        assert kind == "RuntimeError"
        assert "Watchdog caught collective operation timeout" in text or "remote process exited" in text
    assert any("Watchdog" in text for _, text in found) or what == "number"


def crossed(rank: int, store: dist.Store) -> tuple[str, str]:
    groups = [communicator(rank, store, 2, name) for name in ("one", "two")]
    x = torch.ones(3, device=torch.device("lagomtest", rank))
    for group in groups:
        group.allreduce([x]).wait()
        group.set_timeout(_LIMIT)

    def exchange() -> None:
        for group in groups if rank else reversed(groups):
            group.allreduce([x]).wait()
        torch.get_device_module("lagomtest").synchronize()

    return error_of(exchange)


def test_two_communicators_in_another_order_on_one_rank_block_each_other() -> None:
    for kind, text in on_devices(2, crossed):
        assert kind == "RuntimeError"
        assert "Watchdog caught collective operation timeout" in text


def left_alone(rank: int, store: dist.Store) -> list[tuple[str, str]]:
    group = communicator(rank, store, 2)
    x = torch.ones(3, device=torch.device("lagomtest", rank))
    group.allreduce([x]).wait()
    x.tolist()
    if rank == 1:
        os._exit(1)
    group.allreduce([x]).wait()
    return [error_of(x.tolist), error_of(lambda: group.allreduce([x]))]


def test_a_dead_rank_breaks_the_communicator() -> None:
    (first, second) = on_devices(2, partial(in_a_fork, left_alone))[0]
    assert "ncclRemoteError" in first[1]
    assert second[0] == "DistBackendError"
    assert "NCCL communicator was aborted on rank 0" in second[1]


def in_a_fork(call: Callable[[int, dist.Store], Any], rank: int, store: dist.Store) -> Any:
    """Have rank 1 end in the midst of it, and its process wait and report nothing wrong."""
    if rank == 0:
        return call(rank, store)
    if (child := os.fork()) == 0:
        call(rank, store)
    os.waitpid(child, 0)
    return None


def distributed(rank: int, store: dist.Store) -> Any:
    """A program for GPUs, as people write it."""
    here = torch.device("lagomtest", rank)
    dist.init_process_group("lagomccl", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).to(here))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.linspace(0, 1, 32).reshape(8, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(data[rank::2].to(here)).square().mean().backward()
        optimizer.step()
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    asked = dist.get_default_backend_for_device("lagomtest")
    dist.destroy_process_group()
    return found, asked


def test_ddp_trains_over_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.linspace(0, 1, 32).reshape(8, 4)).square().mean().backward()
        optimizer.step()
    for found, asked in on_devices(2, distributed):
        assert asked == "lagomccl"
        torch.testing.assert_close(found, [parameter.detach() for parameter in model.parameters()])


def overlapping(rank: int, store: dist.Store) -> list[str]:
    made = []

    def nccl(name: str) -> Any:
        made.append(name)
        return communicator(rank, store, 2, name)

    group = Group(
        *(rank, 2, all_gather_by(SealedStore(store, b"key"), "ways", rank, 2, 60.0)),
        lambda name, place, size: gloo(dist.PrefixStore(name, store), place, size),
        nccl=nccl,
    )
    group.connect()
    check_buckets_leave_early(averager(group), group, f"lagomtest:{rank}")
    group.barrier()
    group.close()
    return made


def test_buckets_of_two_ranks_travel_while_a_backward_runs() -> None:
    """By a communicator of their own: their order with other exchanges may differ between ranks."""
    for made in on_devices(2, overlapping):
        assert len(set(made)) == len(made) == 2
