"""Programs that are distributed already: they join, and get what torchrun would have given them."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lagom.exchange import shared_memory as shared_memory
from lagom.exchange.torch_backend.shared_group import SharedProcessGroup
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import RankFailedError, run_ranks, session_alone

again = functools.partial(pytest.param, marks=pytest.mark.soak)


def torchrun(session: Session) -> None:
    """Set an address as torchrun does, since the judge's ranks have no patches."""
    if session.store is not None:
        store = dist.PrefixStore("judge", session.store)
        dist.init_process_group("gloo", store=store, rank=session.rank, world_size=session.world_size)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _kept.append(dist.group.WORLD)


_kept: list[Any] = []
"""Destroying a gloo group may deadlock. See Note [Kept groups] in distributed/init_process_group.py."""


def by_hand(join: Callable[[Session], Any], num_workers: int = 0) -> Callable[[Session], Any]:
    """A program with everything that lagom would have changed: sampler, BatchNorm, dropout, an own stream, backward."""

    def program(session: Session) -> Any:
        assert not dist.is_initialized()
        torch.manual_seed(11)
        inputs = torch.randn(36, 3, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1)).double()
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        if session.world_size == 1:
            torchrun(session)
        else:
            join(session)
        torch.manual_seed(dist.get_rank())
        wrapped = DistributedDataParallel(model)
        sampler: DistributedSampler[Any] = DistributedSampler(data, seed=2)
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=num_workers)
        local = nn.Linear(3, 1).double()  # not wrapped: each rank's own
        optimizer = torch.optim.SGD([*wrapped.parameters(), *local.parameters()], lr=0.1)
        seen, total = [], torch.zeros((), dtype=torch.float64)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(wrapped(x) + local(x), y)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                seen.append(x)
        dist.all_reduce(total)
        whole = [x for x, _ in DataLoader(data, batch_size=5)]
        dist.destroy_process_group()
        state = copy.deepcopy(model.state_dict()) | {f"local.{key}": v for key, v in local.state_dict().items()}
        return state, torch.cat(seen), total, torch.cat(whole), torch.rand(3)

    return program


JOINS: dict[str, Callable[[Session], Any]] = {
    "nothing": lambda _: dist.init_process_group(),
    "backend": lambda _: dist.init_process_group("gloo"),
    "devices": lambda _: dist.init_process_group("cpu:gloo"),
    "env": lambda _: dist.init_process_group(backend="gloo", init_method="env://"),
    "tcp": lambda s: dist.init_process_group("gloo", "tcp://10.255.1.1:9", None, s.world_size, s.rank),
    "query": lambda s: dist.init_process_group("gloo", f"tcp://h:1?rank={s.rank}&world_size={s.world_size}"),
    "file": lambda s: dist.init_process_group("gloo", "file:///nowhere/x", rank=s.rank, world_size=s.world_size),
    "store": lambda s: dist.init_process_group("gloo", store=dist.HashStore(), rank=s.rank, world_size=s.world_size),
    "timeout": lambda _: dist.init_process_group("gloo", None, timedelta(seconds=50), pg_options=None),
}


@pytest.mark.soak  # below, and in tests/programs/test_distributed.py, programs are compared with torchrun on two ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_and_batches_are_those_under_torchrun_bit_for_bit(world_size: int) -> None:
    wanted = run_ranks(world_size, by_hand(torchrun), patches=False)
    split = run_ranks(world_size, by_hand(JOINS["backend"], num_workers=1))
    whole = run_ranks(world_size, by_hand(JOINS["backend"]), batches="whole", evaluation="gathered")
    for found in (split, whole):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.fixture(scope="module")
def under_torchrun() -> Any:
    """Values of two ranks in the environment that torchrun would give them."""
    return run_ranks(2, by_hand(torchrun), patches=False)


@pytest.mark.parametrize(
    "how",
    [
        *("nothing", "tcp"),
        *(pytest.param(how, marks=pytest.mark.soak) for how in JOINS if how not in ("nothing", "backend", "tcp")),
    ],
)
def test_however_it_is_asked_for_it_is_lagoms_world(how: str, under_torchrun: Any) -> None:
    torch.testing.assert_close(run_ranks(2, by_hand(JOINS[how])), under_torchrun, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("backend", "collectives", "shared"), [(None, "auto", True), ("gloo", "auto", False), (None, "gloo", False)]
)
def test_a_backend_that_is_not_named_shares_memory(
    backend: str | None, collectives: Literal["auto", "gloo"], shared: bool
) -> None:
    def program(session: Session) -> tuple[list[bool], list[float], str]:
        defaults = dict(dist.Backend.default_device_backend_map)
        with patched(session):
            dist.init_process_group(backend)
            groups = [dist.group.WORLD, dist.new_group(), dist.new_group([0])]
            kinds = [isinstance(group, SharedProcessGroup) for group in groups[: 3 - session.rank]]
            number = torch.tensor([session.rank + 1.0])
            dist.all_reduce(number, group=groups[1])
        assert dist.Backend.default_device_backend_map == defaults
        return kinds, number.tolist(), defaults["cpu"]

    first, second = run_ranks(2, program, patches=False, collectives=collectives)
    assert set(first[0] + second[0]) == {shared}
    assert first[1] == second[1] == [3.0]
    assert first[2] == "gloo"


@pytest.mark.parametrize("where", ["each on a host of its own", "without the compiled part"])
def test_ddp_runs_where_ranks_share_no_memory(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "without the compiled part":
        monkeypatch.setattr(shared_memory, "native", lambda: None)

    def program(session: Session) -> list[float]:
        if where == "each on a host of its own":
            monkeypatch.setattr(shared_memory, "home", lambda: f"host {session.rank}")
        dist.init_process_group()
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), session.rank + 1.0)).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return gradient.flatten().tolist()

    assert run_ranks(2, program, collectives="auto") == [[1.5, 1.5]] * 2


def test_variables_that_the_program_sets_for_itself_need_not_lead_anywhere() -> None:
    def program(session: Session) -> tuple[int, int]:
        os.environ |= {"RANK": str(session.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()

    assert run_ranks(2, program) == [(0, 2), (1, 2)]


def test_a_group_can_be_made_again() -> None:
    def program(_: Session) -> list[float]:
        found = []
        for _attempt in range(3):
            dist.init_process_group("gloo")
            number = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(number)
            found.append(number.item())
            dist.destroy_process_group()
        return found

    assert run_ranks(3, program) == [[6.0] * 3] * 3


def test_twice_is_torchs_own_error() -> None:
    def program(_: Session) -> None:
        dist.init_process_group("gloo")
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")

    run_ranks(2, program)


def test_meshes_and_sharded_modules_find_the_group() -> None:
    def program(session: Session) -> tuple[torch.Tensor, list[torch.Tensor]]:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (session.world_size,))  # makes the group
        assert dist.is_initialized()
        assert session.has_joined
        whole: Any = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        assert len(whole.to_local()) == 6 // session.world_size
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)).double()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(12, dtype=torch.float64).reshape(6, 2)[session.rank :: session.world_size]
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        return whole.sum().full_tensor(), [p.full_tensor().detach() for p in model.parameters()]

    def alone(_: Session) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(12, dtype=torch.float64).reshape(6, 2)
        for _epoch in range(3):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    wanted = run_ranks(1, alone, patches=False)[0]
    for total, weights in run_ranks(2, program):
        assert total == 15
        for mine, theirs in zip(weights, wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_a_library_that_imported_the_function_earlier_joins_too() -> None:
    from tests.session import early

    def program(_: Session) -> int:
        early.init()
        return dist.get_world_size()

    assert run_ranks(2, program) == [2, 2]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rank": 0, "world_size": 1}, "rank 0 of 1, by its arguments, but this is rank . of the 2"),
        ({"world_size": 4}, r"rank \? of 4, .*run it with world_size=4"),
        again({"init_method": "tcp://h:1?rank=0&world_size=3"}, "rank 0 of 3, by tcp://h:1"),
        ({"backend": "mpi"}, "not started by mpirun"),
        ({"backend": "nccl"}, "not every rank of this run has a GPU to itself"),
        again({"backend": "cpu:gloo,cuda:nccl"}, "use 'gloo' or none"),
    ],
)
def test_what_lagoms_ranks_cannot_be_is_an_error_that_says_so(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RankFailedError, match=f"LagomError: .*{said}"):
        run_ranks(2, lambda _: dist.init_process_group(**asked))


def test_variables_of_another_world_are_an_error() -> None:
    def program(_: Session) -> None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        dist.init_process_group("gloo")

    with pytest.raises(RankFailedError, match="rank 0 of 1, by the environment"):
        run_ranks(2, program)


def loader_first(_: Session) -> None:
    next(iter(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2)))
    dist.init_process_group("gloo")


def backward_first(_: Session) -> None:
    nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
    dist.init_process_group("gloo")


def sampler_first(_: Session) -> None:
    data = TensorDataset(torch.arange(4.0))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    list(DataLoader(data, batch_size=2, sampler=sampler))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (loader_first, "after training began as an ordinary program: a data loader was shared out"),
        again(backward_first, "after training began as an ordinary program: a backward ran"),
        (sampler_first, "a DistributedSampler for 2 replicas was used before init_process_group"),
    ],
)
def test_joining_in_the_middle_is_an_error(program: Callable[[Session], None], said: str) -> None:
    with pytest.raises(RankFailedError, match=said):
        run_ranks(2, program)


def test_evaluation_and_a_sampler_of_one_replica_may_come_first() -> None:
    def program(_: Session) -> int:
        data = TensorDataset(torch.arange(4.0))
        with torch.no_grad():
            assert len(list(DataLoader(data, batch_size=2))) == 2
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
        with torch.no_grad():
            one: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
            assert len(list(DataLoader(data, batch_size=2, sampler=one))) == 2
        dist.init_process_group("gloo")
        return len(list(DataLoader(data, batch_size=2, sampler=sampler)))

    assert run_ranks(2, program) == [1, 1]


@pytest.mark.parametrize("instead", ["the end of the program", again("a data loader"), "a backward"])
def test_a_rank_that_does_not_join_is_an_error_on_the_others(instead: str) -> None:
    def program(session: Session) -> None:
        if session.rank == 0:
            with pytest.raises(Exception, match=r"rank 0 at init_process_group\(\), rank 1 at"):
                dist.init_process_group("gloo")
            raise KeyError("rank 0 was told")
        if instead == "a data loader":
            list(DataLoader(TensorDataset(torch.arange(4.0))))
        elif instead == "a backward":
            nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()

    with pytest.raises(RankFailedError, match="rank 0 was told"):
        run_ranks(2, program)


def test_the_timeout_is_the_programs() -> None:
    def program(session: Session) -> None:
        dist.init_process_group("gloo", timeout=timedelta(milliseconds=300))
        theirs: Any = dist.distributed_c10d._get_default_store()
        ours: Any = session.store
        assert theirs.timeout == timedelta(milliseconds=300) < ours.timeout
        if session.rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.all_reduce(torch.ones(1))
            ours.set("through", "")
        else:
            ours.wait(["through"])

    run_ranks(2, program)


def test_what_is_left_initialised_is_destroyed_and_torch_is_as_before() -> None:
    def program(session: Session) -> None:
        hook, init = sys.excepthook, dist.init_process_group
        with patched(session):
            dist.init_process_group("gloo")
            kept = dist.init_process_group
        assert not dist.is_initialized()
        assert sys.excepthook is hook
        assert dist.init_process_group is init
        assert dist.device_mesh.init_process_group is init
        # Who still has it gets torch's own.
        kept("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_world_size() == 1
        dist.destroy_process_group()

    run_ranks(2, program, patches=False)


@pytest.mark.parametrize("error", [None, ValueError])
def test_at_world_size_1_the_call_is_torchs_and_nothing_is_left(tmp_path: Path, error: type[Exception] | None) -> None:
    hook, session = sys.excepthook, session_alone(tmp_path)
    try:
        with patched(session):
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
            assert (tmp_path / "store").exists()
            if error is not None:
                raise error
    except ValueError:
        assert error is ValueError
    assert session.has_joined
    assert sys.excepthook is hook


def test_a_failure_is_raised_at_once_while_another_rank_waits_in_the_programs_group() -> None:
    def program(session: Session) -> None:
        dist.init_process_group("gloo")
        if session.rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
            raise KeyError("rank 0's own")
        dist.barrier()

    with pytest.raises(RankFailedError, match="rank 0's own"):
        run_ranks(2, program)


def test_the_function_pickles_by_name() -> None:
    def program(_: Session) -> bool:
        return pickle.loads(pickle.dumps(dist.init_process_group)) is dist.init_process_group

    assert run_ranks(2, program) == [True, True]


def test_torchs_fake_group_stays_ordinary() -> None:
    def program(session: Session) -> tuple[int, bool]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
        return dist.get_world_size(), session.has_joined

    assert run_ranks(2, program) == [(64, False)] * 2


def test_files_are_those_of_all_ranks_once_they_are_joined(tmp_path: Path) -> None:
    def run(session: Session) -> tuple[str, str]:
        os.chdir(tmp_path)
        os.mkdir("out")
        os.chdir("out")  # a directory of the rank's own, until here
        dist.init_process_group("gloo")
        _kept.append(dist.group.WORLD)
        Path(f"{session.rank}.txt").write_text(str(session.rank))
        dist.barrier()
        return os.getcwd(), Path(f"{1 - session.rank}.txt").read_text()

    assert run_ranks(2, run) == [(f"{tmp_path}/out", "1"), (f"{tmp_path}/out", "0")]
