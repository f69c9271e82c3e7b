"""``lagom.exchange.hosts``: ranks of several hosts, which here are one machine that says it were many."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lagom.errors import CollectiveError, DivergenceError
from lagom.exchange import shared_memory as handing
from lagom.exchange.native import native
from lagom.exchange.torch_backend.registration import register
from lagom.exchange.transports import connect_memory
from lagom.session.session import Session
from tests.encryption import credentials
from tests.ranks import RankFailedError, alone, gloo_of, run_ranks, text_gather

if native() is None:
    pytest.skip("lagom was installed without its compiled part: no compiler, or no Linux", allow_module_level=True)

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
AGAIN = pytest.param([0, 0, 1], marks=pytest.mark.soak)
"""Hosts of uneven numbers of ranks, as [0, 0, 1, 1, 2] has them."""


def joined(session: Session, monkeypatch: pytest.MonkeyPatch, where: list[int]) -> Any:
    """The group, whose ranks are on these hosts."""
    monkeypatch.setattr(handing, "home", lambda: f"host {where[session.rank]}")
    assert session.group is not None
    return session.group


@pytest.mark.parametrize(
    "where",
    [
        AGAIN,
        pytest.param([0, 1, 0, 1], marks=pytest.mark.soak),
        pytest.param([0, 1, 1, 1], marks=pytest.mark.soak),
        pytest.param([0, 1, 2], marks=pytest.mark.soak),
        [0, 0, 1, 1, 2],
    ],
)
def test_sums_over_hosts_are_those_of_gloo(where: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> Any:
        group = joined(session, monkeypatch, where)
        wrong, judge = [], gloo_of(session)
        group.open_aside()
        for dtype in TYPES:
            for count in (0, 1, 77, 1_600_001 if dtype == torch.float32 else 10_001):
                generator = torch.Generator().manual_seed(session.rank)
                mine = torch.randint(-9, 9, (count,), generator=generator).to(dtype)  # whose sums are exact
                wanted = mine.clone()
                judge.allreduce([wanted]).wait()
                beside = mine.clone()
                work = group.all_reduce_aside(beside)
                group.all_reduce(mine)
                group.wait(work)
                if not (torch.equal(mine, wanted) and torch.equal(beside, wanted)):
                    wrong.append((dtype, count))
        one = torch.ones(1000) / (session.rank + 3)
        group.all_reduce(one)
        assert (group.sums_itself, group.shares_memory) == (True, False)
        return wrong, [bytes(row) for row in group.exchange(one.numpy().tobytes())]

    found = run_ranks(len(where), run, patches=False, collectives="auto")
    assert [wrong for wrong, _ in found] == [[]] * len(where)
    assert len({row for _, rows in found for row in rows}) == 1  # the same bits everywhere


@pytest.mark.parametrize(
    "where",
    [
        AGAIN,
        pytest.param([0, 1, 0, 1], marks=pytest.mark.soak),
        pytest.param([0, 1], marks=pytest.mark.soak),
        [0, 0, 1, 1, 2],
    ],
)
def test_what_is_broadcast_gathered_and_dealt_over_hosts_is_what_gloo_gives(
    where: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(session: Session) -> Any:
        group = joined(session, monkeypatch, where)
        rank, size, judge = session.rank, session.world_size, gloo_of(session)
        wrong: list[tuple[object, ...]] = []
        between = connect_memory(rank, text_gather(session), "127.0.0.1", 60.0)
        assert not isinstance(between, str)
        for dtype in (*TYPES, torch.bool):
            for count in (0, 1, 77, 700_001 if dtype == torch.float32 else 10_001):
                generator = torch.Generator().manual_seed(rank)
                mine = torch.randint(-9, 9, (count,), generator=generator).to(dtype)  # whose sums are exact
                for root in range(size):
                    found, wanted = mine.clone(), mine.clone()
                    group.broadcast(found, root)
                    judge.broadcast(wanted, root).wait()
                    if not torch.equal(found, wanted):
                        wrong.append(("broadcast", dtype, count, root))
                theirs = [torch.empty_like(mine) for _ in range(size)]
                if count:
                    judge.allgather([theirs], [mine]).wait()
                if not torch.equal(torch.stack(group.all_gather(mine)), torch.stack(theirs)):
                    wrong.append(("all_gather", dtype, count))
                if dtype != torch.bool:
                    given = torch.randint(-9, 9, (size, count), generator=generator).to(dtype)
                    out, wanted = torch.empty_like(mine), given.clone()
                    between[0].reduce_scatter(out, given)
                    judge.allreduce([wanted]).wait()
                    if not torch.equal(out, wanted[rank]):
                        wrong.append(("reduce_scatter", dtype, count))
        return wrong

    assert run_ranks(len(where), run, patches=False, collectives="auto") == [[]] * len(where)


@pytest.mark.soak  # sums of such sizes are above
def test_large_gradients_over_hosts_are_those_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(900, 900), torch.nn.Tanh(), torch.nn.Linear(900, 900)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(24, 900).double(), torch.randn(24, 900).double())
        for x, y in torch.utils.data.DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    def run(session: Session) -> Any:
        group = joined(session, monkeypatch, [0, 1, 0, 1])
        return weights(), group.sums_itself and not group.shares_memory

    wanted = alone(lambda _: weights())
    for found, spread in run_ranks(4, run, collectives="auto"):
        assert spread
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_small_gradients_and_statistics_over_hosts_are_those_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(0)
        linear, norm = torch.nn.Linear(6, 4).double(), torch.nn.BatchNorm1d(4).double()
        model, half = torch.nn.Sequential(linear, norm, torch.nn.Tanh()), torch.nn.Linear(4, 1).bfloat16()
        optimizer = torch.optim.SGD([*model.parameters(), *half.parameters()], lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(40, 6).double() + 5.0, torch.randn(40, 1).double())
        for x, y in torch.utils.data.DataLoader(data, batch_size=10):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x).sum(1, keepdim=True), y).backward()
            half(torch.ones(10, 4).bfloat16()).sum().backward()
            optimizer.step()
        return [one.detach() for one in (*model.state_dict().values(), *half.parameters())]

    def run(session: Session) -> Any:
        group = joined(session, monkeypatch, [0, 1, 1, 2, 0])
        return weights(), group.sums_itself and not group.shares_memory

    wanted = alone(lambda _: weights())
    several = run_ranks(5, run, collectives="auto")
    for found, spread in several:
        assert spread
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(one, other) for one, other in zip(found, several[0][0], strict=True))


@pytest.mark.parametrize("where", [pytest.param([0, 1], marks=pytest.mark.soak), [0, 0, 1]])
def test_gradients_without_elements_are_exchanged_over_hosts(where: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> float:
        joined(session, monkeypatch, where)
        empty, full = torch.nn.Parameter(torch.zeros(0)), torch.nn.Linear(300, 300, bias=False)  # one in a bucket
        (full(torch.ones(2, 300) * session.rank).sum() + empty.sum()).backward()
        assert full.weight.grad is not None
        return full.weight.grad[0, 0].item()

    mean = 2 * sum(range(len(where))) / len(where)
    assert run_ranks(len(where), run, collectives="auto", batches="per_rank") == [mean] * len(where)


def test_ranks_of_different_hosts_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> str:
        joined(session, monkeypatch, [0, 0, 1, 2])
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            out = model(x)
            if session.rank == 2:
                out = out + torch.nn.functional.batch_norm(out, None, None, training=True)
            out.sum().backward()
            optimizer.step()

        (x,) = next(iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3)), batch_size=4)))
        with pytest.raises(DivergenceError) as caught:
            step(x)
        return str(caught.value)

    for text in run_ranks(4, run, collectives="auto"):
        assert "rank 1 at a backward on batch 1 of a pass, rank 2 at the forward of a BatchNorm of 1 channels" in text


def test_a_rank_that_dies_on_a_host_is_an_error_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> None:
        group = joined(session, monkeypatch, [0, 0, 1, 1])
        one = torch.ones(3_000_000)
        group.all_reduce(one)
        if session.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CollectiveError) as caught:
            group.all_reduce(one)
        if session.rank == 2:
            assert "rank 3 is gone, and rank 2 waits for it" in str(caught.value)

    with pytest.raises(RankFailedError, match="rank 3 failed:\nit died"):
        run_ranks(4, run, patches=False, collectives="auto")


def test_what_hosts_have_not_is_gloos_and_averages_are_divided_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session, backend: str) -> Any:
        monkeypatch.setattr(handing, "home", lambda: f"host {session.rank % 2}")
        warnings.simplefilter("ignore")  # torch's, about names of its own
        register()
        rank, size = session.rank, session.world_size
        dist.init_process_group(backend, store=session.store, rank=rank, world_size=size)
        most = [torch.full((4,), float(rank + 10 * i)) for i in (1, 5, 3)]
        dist.all_reduce_coalesced(most, dist.ReduceOp.MAX)
        gathered = [[torch.zeros(n) for n in (2, 3)] for _ in range(size)]
        dist.all_gather_coalesced(gathered, [torch.full((n,), float(rank)) for n in (2, 3)])
        found = [*most, *(one for row in gathered for one in row)]
        for count in (1, 5):  # what does not lie in order: over gloo it would be taken with what lies between
            apart = torch.full((count, 2), 1.0 * rank)[:, 0]
            columns = [apart.clone() if backend == "gloo" else torch.stack((apart, -apart), 1)[:, 0] for _ in range(4)]
            dist.all_reduce(columns[0], dist.ReduceOp.MAX)
            dist.all_reduce(columns[1])
            dist.broadcast(columns[2], 1)
            rows = torch.zeros(size * count)
            dist.all_gather_into_tensor(rows, columns[3])
            found += [*columns, rows]
        for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            part, mean = torch.zeros(5), torch.arange(7.0) * (rank - 1)
            dist.reduce_scatter_tensor(part, torch.arange(5.0 * size) * (rank - 1), op)
            dist.all_reduce(mean, op)
            found += [part, mean]
        outs, lists = torch.zeros(rank + 1), [torch.full((i + 1,), float(rank)) for i in range(size)]
        dist.reduce_scatter(outs, lists)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Linear(13, 4))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        model(torch.ones(3, 6) * rank).square().mean().backward()
        whole = [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
        dist.barrier()
        return [*found, outs, *whole], type(dist.group.WORLD).__name__

    ours, theirs = (
        run_ranks(3, lambda session, backend=backend: run(session, backend), patches=False)  # type: ignore[misc]
        for backend in ("lagom", "gloo")
    )
    for (found, kind), (wanted, _) in zip(ours, theirs, strict=True):
        assert kind == "SharedProcessGroup"
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_ddp_over_hosts_ends_with_gloos_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session, backend: str) -> Any:
        monkeypatch.setattr(handing, "home", lambda: f"host {session.rank % 2}")
        warnings.simplefilter("ignore")  # torch's, about names of its own
        register()
        dist.init_process_group(backend, store=session.store, rank=session.rank, world_size=session.world_size)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(50, 700), torch.nn.Linear(700, 3)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(session.rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 50, generator=generator).double()).square().mean().backward()
            optimizer.step()
        half = dist.new_group([0, 2])  # which are on one host
        total = torch.ones(3, 2).t()
        if session.rank in (0, 2):
            dist.all_reduce(total, group=half)
        later = [torch.full((100,), 1.0 * session.rank) for _ in range(3)]
        works = [dist.all_reduce(one, async_op=True) for one in later]
        least, gathered = torch.tensor([session.rank]), [torch.zeros(1) for _ in range(session.world_size)]
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_gather(gathered, torch.ones(1) * session.rank)
        for work in works:
            work.wait()
        sent = torch.arange(6.0).view(2, 3).t() + session.rank
        dist.broadcast(sent, 1)
        rows, part = torch.zeros(20), torch.zeros(5)
        dist.all_gather_into_tensor(rows, torch.arange(5.0) + session.rank)
        dist.reduce_scatter_tensor(part, rows * session.rank)
        later += [sent, rows, part]
        dist.barrier()
        kinds = type(dist.group.WORLD).__name__, type(half).__name__
        others = [total.tolist(), least.tolist(), *(one.tolist() for one in (*later, *gathered))]
        return [parameter.detach() for parameter in model.parameters()], others, kinds

    ours, theirs = (
        run_ranks(4, lambda session, backend=backend: run(session, backend), patches=False)  # type: ignore[misc]
        for backend in ("lagom", "gloo")
    )
    for rank, ((mine, others, kinds), (wanted, as_wanted, _)) in enumerate(zip(ours, theirs, strict=True)):
        assert kinds == ("SharedProcessGroup", "SharedProcessGroup" if rank in (0, 2) else "int")
        assert others == as_wanted
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.forked  # ranks inherit the credentials
def test_encrypted_hosts_need_gloo_for_few_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> Any:
        rank, size = session.rank, session.world_size
        monkeypatch.setattr(handing, "home", lambda: f"host {rank % 2}")
        warnings.simplefilter("ignore")  # torch's, about names of its own
        register(credentials())
        dist.init_process_group("lagom", store=session.store, rank=rank, world_size=size)
        rows, part = [torch.zeros(2) for _ in range(size)], torch.zeros(rank + 1)
        dist.all_gather(rows, torch.full((2,), float(rank)))
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
        total, short, flags = torch.ones(3) * (rank + 1), torch.ones(4, dtype=torch.int16), torch.arange(3) == rank
        dist.reduce(total, 1)
        dist.reduce_scatter(part, [torch.full((i + 1,), float(i)) for i in range(size)])
        dist.all_reduce(short)
        dist.all_reduce(flags)
        dist.barrier()
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Linear(5, 3))
        with pytest.raises(CollectiveError, match="gloo sends in clear"):
            dist.all_to_all_single(torch.empty(3), torch.ones(3))
        weights = [one.detach().tolist() for one in model.parameters()]
        return [one.tolist() for one in (*rows, total, part, short, flags)], everyone, weights

    credentials()
    found = run_ranks(3, run, patches=False)
    torch.manual_seed(0)
    wanted = [one.detach().tolist() for one in torch.nn.Linear(5, 3).parameters()]
    for rank, (numbers, everyone, weights) in enumerate(found):
        total = [6.0 if rank == 1 else rank + 1.0] * 3
        part = [3.0 * rank] * (rank + 1)
        assert numbers == [[0.0] * 2, [1.0] * 2, [2.0] * 2, total, part, [3] * 4, [True] * 3]
        assert everyone == [{"rank": i, "text": "x" * i} for i in range(3)]
        assert weights == wanted


def test_barriers_over_hosts_wait_for_earlier_exchanges_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> Any:
        monkeypatch.setattr(handing, "home", lambda: f"host {session.rank % 2}")
        warnings.simplefilter("ignore")  # torch's, about names of its own
        register()
        dist.init_process_group("lagom", store=session.store, rank=session.rank, world_size=session.world_size)
        group: Any = dist.group.WORLD
        done = []
        for wait in (dist.barrier, group.monitored_barrier):
            works = [dist.all_reduce(torch.ones(1000), dist.ReduceOp.MAX, async_op=True) for _ in range(50)]
            wait()
            done += [work.is_completed() for work in works]
        return all(done)

    assert run_ranks(3, run, patches=False) == [True] * 3
