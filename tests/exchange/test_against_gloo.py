"""The backend "lagom" beside gloo in the same ranks: types, layouts, worlds, sub-groups, sequences, killed ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore

from lagom.exchange.native import native
from lagom.exchange.torch_backend.registration import register
from lagom.session.session import Session
from tests.ranks import RankFailedError, run_ranks

if native() is None:
    pytest.skip("lagom was installed without its compiled part: no compiler, or no Linux", allow_module_level=True)

TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
"""Types that gloo can reduce."""
OPERATIONS = ("SUM", "MIN", "MAX", "PRODUCT")
KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter")
COUNTS = (0, 1, 7, 1000, 150_001)
LAYOUTS = ("plain", "transposed", "strided")
Step = tuple[str, torch.dtype, str, int, str, int, bool, bool]
"""Collective, type, operation, elements, layout, root, whether asynchronous, whether of the sub-group."""


def join(session: Session) -> tuple[Any, Any, Any, Any]:
    """Groups of all ranks and of all but the last: by "lagom", and by gloo."""
    warnings.simplefilter("ignore")  # torch's, about names of its own
    register()
    size = session.world_size
    store = PrefixStore("program", session.store) if session.store is not None else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=session.rank, world_size=size, timeout=timedelta(seconds=50))
    some = list(range(max(size - 1, 1)))
    ours, gloos = dist.new_group(backend="lagom"), dist.new_group(backend="gloo")
    return ours, gloos, dist.new_group(some, backend="lagom"), dist.new_group(some, backend="gloo")


def laid_out(one: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the numbers of ``one`` in another layout of memory."""
    if layout == "strided":
        wide = one.new_zeros(len(one), 3)
        wide[:, 1] = one
        return wide[:, 1]
    if layout == "transposed" and len(one) % 7 == 0:
        return one.view(7, -1).t().contiguous().t()
    return one


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers so small that sums and products are exact in all types."""
    generator = torch.Generator().manual_seed(31 * rank + count)
    return torch.randint(0 if dtype == torch.uint8 else -1, 3, (count,), generator=generator).to(dtype)


def do(step: Step, rank: int, size: int, group: Any, is_ours: bool) -> tuple[Any, list[torch.Tensor]]:
    """Begin a collective; its work, if any, and what it fills."""
    kind, dtype, operation, count, layout, root, is_async, _ = step
    if not is_ours:
        layout = "plain"  # gloo insists on it
    one = laid_out(numbers(rank, count, dtype), layout)
    op = getattr(dist.ReduceOp, operation)
    root %= size
    if kind == "all_reduce":
        return dist.all_reduce(one, op, group, is_async), [one]
    if kind == "broadcast":
        return dist.broadcast(one, root, group, is_async), [one]
    if kind == "reduce":
        work = dist.reduce(one, root, op, group, is_async)
        return work, [one] if rank == root else []
    if kind == "all_gather":
        rows = [torch.full((count,), 9, dtype=dtype) for _ in range(size)]
        return dist.all_gather(rows, one, group, is_async), rows
    if kind == "gather":
        rows = [torch.full((count,), 9, dtype=dtype) for _ in range(size)] if rank == root else []
        return dist.gather(one, rows or None, root, group, is_async), rows
    if kind == "scatter":
        rows = [laid_out(numbers(rank + k, count, dtype), layout) for k in range(size)] if rank == root else []
        return dist.scatter(one, rows or None, root, group, is_async), [one]
    many = laid_out(numbers(rank, count * size, dtype), layout)
    if kind == "reduce_scatter":
        return dist.reduce_scatter_tensor(one, many, op, group, is_async), [one]
    many = laid_out(many.reshape(-1), "plain" if layout == "plain" else "strided")  # it goes by rows
    out = torch.full((count * size,), 9, dtype=dtype)
    return dist.all_to_all_single(out, many, group=group, async_op=is_async), [out]


def compare(session: Session, steps: list[Step]) -> list[Step]:
    """Steps in which the backend "lagom" gave anything else than gloo."""
    ours, gloos, our_part, gloo_part = join(session)
    rank, wrong, under_way = session.rank, [], []
    for step in steps:
        size = session.world_size
        left, right = ours, gloos
        if step[-1]:
            left, right, size = our_part, gloo_part, max(size - 1, 1)
            if rank >= size:
                continue
        under_way.append((step, do(step, rank, size, left, True), do(step, rank, size, right, False)))
        if not step[-2] or len(under_way) > 3:
            wrong += settle(under_way)
    wrong += settle(under_way)
    dist.barrier(ours)
    return wrong


def settle(under_way: list[Any]) -> list[Step]:
    wrong = []
    for step, (work, found), (other, wanted) in under_way:
        for one in (work, other):
            if one is not None:
                one.wait()
        if not all(torch.equal(a.reshape(-1), b) for a, b in zip(found, wanted, strict=True)):
            wrong.append(step)
    under_way.clear()
    return wrong


@pytest.mark.parametrize(  # three ranks show what two do
    "world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 4, 5, 6, 7, 8))]
)
def test_every_collective_type_operation_and_layout_gives_what_gloo_gives(world_size: int) -> None:
    steps: list[Step] = [
        (kind, dtype, operation, count, layout, 1, False, False)
        for kind in KINDS
        for dtype in TYPES
        for operation in (OPERATIONS if "reduce" in kind else ("SUM",))
        for count, layout in ((0, "plain"), (7, "transposed"), (1001, "strided"))
    ]
    assert run_ranks(world_size, lambda session: compare(session, steps), patches=False) == [[]] * world_size


SEQUENCES = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(TYPES),
        st.sampled_from(OPERATIONS),
        st.sampled_from(COUNTS),
        st.sampled_from(LAYOUTS),
        st.integers(0, 7),
        st.booleans(),
        st.booleans(),
    ),
    min_size=5,
    max_size=40,
)


@pytest.mark.soak  # tests/exchange/test_registration.py has a sequence of collectives, some under way at once
@given(steps=SEQUENCES)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_sequences_of_collectives_give_what_gloo_gives(steps: list[Step]) -> None:
    assert run_ranks(3, lambda session: compare(session, steps), patches=False) == [[]] * 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
@given(steps=SEQUENCES, world_size=st.integers(1, 8))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_sequences_of_collectives_give_what_gloo_gives(steps: list[Step], world_size: int) -> None:
    assert run_ranks(world_size, lambda session: compare(session, steps), patches=False) == [[]] * world_size


def killed_in(kind: str, seed: int) -> None:
    """Rank 1 of 3 is killed while all repeat a collective; the others must say so, and nothing else."""
    delay_s = random.Random(seed).uniform(0.001, 0.1)

    def run(session: Session) -> None:
        group = join(session)[0]
        if session.rank == 1:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        step: Step = (kind, torch.float32, "SUM", 400_000, "plain", 0, False, False)

        def forever() -> None:
            while True:
                do(step, session.rank, session.world_size, group, is_ours=True)

        with pytest.raises(RuntimeError, match="the process of rank 1 is gone, and rank"):
            forever()

    with pytest.raises(RankFailedError, match="rank 1 failed:\nit died"):
        run_ranks(3, run, patches=False)


@pytest.mark.parametrize("kind", ["broadcast", pytest.param("all_to_all", marks=pytest.mark.soak)])
def test_a_rank_that_is_killed_in_a_collective_is_named_by_the_others(kind: str) -> None:
    killed_in(kind, 0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rank_that_is_killed_in_one_of_a_hundred_collectives_is_named_by_the_others() -> None:
    for seed in range(100):
        killed_in(KINDS[seed % len(KINDS)], seed)
