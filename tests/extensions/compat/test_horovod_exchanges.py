"""Horovod's exchanges, served by lagom: expected values are computed by hand from rank and size."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

import lagom.extensions.compat.horovod.torch as hvd
from tests.extensions.compat.horovod_ranks import WORLDS, Check, checked


def equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype), rtol=1e-12, atol=0)


def allreduce_reduces_by_every_op(rank: int, size: int) -> None:
    x = torch.tensor([rank + 1.0, 10.0 - rank], dtype=torch.float64)
    total, back = size * (size + 1) / 2, 10 * size - size * (size - 1) / 2
    equal(hvd.allreduce(x), [total / size, back / size])
    equal(hvd.allreduce(x, op=hvd.Average, name="named"), [total / size, back / size])
    equal(hvd.allreduce(x, op=hvd.Sum), [total, back])
    equal(hvd.allreduce(x, op=hvd.Min), [1, 10 - (size - 1)])
    equal(hvd.allreduce(x, op=hvd.Max), [size, 10])
    equal(hvd.allreduce(x, op=hvd.Product), [math.factorial(size), math.prod(10 - other for other in range(size))])
    equal(x, [rank + 1, 10 - rank])
    with pytest.warns(DeprecationWarning, match="older spelling"):
        equal(hvd.allreduce(x, average=False), [total, back])
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def allreduce_scales_before_and_after(rank: int, size: int) -> None:
    x = torch.tensor([2.0 + rank])
    total = 2.0 * size + size * (size - 1) / 2
    equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), [total * 2])
    equal(hvd.allreduce(x, prescale_factor=3.0), [total * 3 / size])
    # The square of the scaled ones.
    product = math.prod(2 * (2.0 + other) for other in range(size))
    equal(hvd.allreduce(x, op=hvd.Product, prescale_factor=2.0), [product])


def allreduce_keeps_types_and_shapes(rank: int, size: int) -> None:
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.full((2, 3), rank + 1).to(dtype)
        found = hvd.allreduce(x, op=hvd.Sum)
        assert (found.dtype, found.shape) == (dtype, (2, 3))
        equal(found, torch.full((2, 3), size * (size + 1) // 2))
        # Means of integers are cut off.
        equal(hvd.allreduce(torch.full((1,), rank + 2).to(dtype)).long(), [int((size + 3) / 2)])
    equal(hvd.allreduce(torch.tensor(3.0 * (rank + 1))), 1.5 * (size + 1))
    equal(hvd.allreduce(torch.zeros(0, 3)), torch.zeros(0, 3))
    strided = torch.arange(6.0).view(2, 3).t() + rank
    equal(hvd.allreduce(strided), torch.arange(6.0).view(2, 3).t() + (size - 1) / 2)


def allreduce_compresses_to_half_precision(rank: int, size: int) -> None:
    x = torch.tensor([1.0 + rank + 2.0**-13, 1e-9])
    found = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert found.dtype == torch.float32
    equal(found, [size * (size + 1) / 2, 0.0])
    whole = torch.tensor([70000 + rank])
    equal(hvd.allreduce(whole, op=hvd.Sum, compression=hvd.Compression.fp16), [70000 * size + size * (size - 1) // 2])


def allreduce_works_in_place_and_in_groups(rank: int, size: int) -> None:
    x, y = torch.tensor([rank + 1.0]), torch.full((2, 2), float(rank))
    mean = (size + 1) / 2
    assert hvd.allreduce_(x) is x
    equal(x, [mean])
    a, b = hvd.grouped_allreduce([x + rank, y], op=hvd.Sum, name="both")
    equal(a, [size * mean + size * (size - 1) / 2])
    equal(b, torch.full((2, 2), size * (size - 1) / 2))
    given = [torch.tensor([1.0 + rank]), torch.tensor([1 + rank])]  # of two types
    found = hvd.grouped_allreduce_(given, op=hvd.Sum)
    assert all(one is other for one, other in zip(found, given, strict=True))
    equal(given[1], [size * (size + 1) // 2])
    parameter = torch.nn.Parameter(torch.tensor([rank + 1.0]))
    hvd.allreduce_(parameter, op=hvd.Sum)
    equal(parameter.detach(), [size * (size + 1) / 2])


def handles_are_polled_and_synchronized_once(rank: int, size: int) -> None:
    x = torch.tensor([float(rank)])
    handle = hvd.allreduce_async(x, op=hvd.Sum, name="polled")
    while not hvd.poll(handle):
        pass
    equal(hvd.synchronize(handle), [size * (size - 1) / 2])
    assert hvd.synchronize(handle) is None
    assert hvd.poll(handle)
    in_place = hvd.allreduce_async_(x, op=hvd.Sum)
    assert hvd.synchronize(in_place).data_ptr() == x.data_ptr()
    equal(x, [size * (size - 1) / 2])
    several = hvd.grouped_allreduce_async([x, x], op=hvd.Max)
    assert len(hvd.synchronize(several)) == 2
    hvd.synchronize(hvd.grouped_allreduce_async_([x], op=hvd.Max))


def names_may_come_in_another_order_on_each_rank(rank: int, size: int) -> None:
    names = [f"out of order {at}" for at in range(12)]
    order = names[rank * 5 :] + names[: rank * 5]
    handles = {name: hvd.allreduce_async(torch.tensor([float(names.index(name))]), name=name) for name in order}
    for name in reversed(order):
        equal(hvd.synchronize(handles[name]), [float(names.index(name))])
    # Also where each waits before it asks for the next: another kind for each of the names.
    first = hvd.allgather_async(torch.tensor([rank]), name="kind a") if rank % 2 else None
    second = hvd.broadcast_async(torch.tensor([rank + 7]), 0, name="kind b")
    first = first if first is not None else hvd.allgather_async(torch.tensor([rank]), name="kind a")
    equal(hvd.synchronize(first), list(range(size)))
    equal(hvd.synchronize(second), [7])


def a_name_under_way_is_refused_a_second_time(rank: int, size: int) -> None:
    if size == 1:
        return
    hvd.barrier()
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match=r"'twice' was asked for while another of that name"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.synchronize(handle)


def ranks_that_disagree_are_told_on_all_of_them(rank: int, size: int) -> None:
    if size == 1:
        return
    x = torch.ones(2)
    cases: list[tuple[Any, str]] = [
        (
            lambda: hvd.allreduce(torch.ones(2 + rank), name="m"),
            r"'m' with different shapes: rank 0 with \[2\], rank 1",
        ),
        (lambda: hvd.allreduce(x.double() if rank else x, name="m"), "data types: rank 0 with float32, rank 1 with"),
        (lambda: hvd.allreduce(x, name="m", op=hvd.Sum if rank else hvd.Max), "reductions: rank 0 with max, rank 1"),
        (lambda: hvd.allreduce(x, name="m", prescale_factor=1.0 + rank), "different factors"),
        (lambda: hvd.broadcast(x, rank, name="m"), "root ranks: rank 0 with 0, rank 1 with 1"),
        (lambda: hvd.broadcast(x, 0, name="m") if rank else hvd.allreduce(x, name="m"), "different operations"),
        (lambda: hvd.allgather(torch.ones(2, 3 + rank), name="m"), "only the first dimension may differ"),
        (lambda: hvd.allgather(torch.tensor(1.0), name="m"), "which has no dimension"),
    ]
    for call, message in cases:
        with pytest.raises(hvd.HorovodInternalError, match=message):
            call()
    equal(hvd.allreduce(x, op=hvd.Sum), [size, size])


def allgather_takes_ragged_rows(rank: int, size: int) -> None:
    rows = torch.full((rank + 1, 2), float(rank))
    equal(hvd.allgather(rows), [[float(other)] * 2 for other in range(size) for _ in range(other + 1)])
    # Rank 0 has none.
    equal(hvd.allgather(torch.full((rank,), rank)), [other for other in range(size) for _ in range(other)])
    assert hvd.allgather(torch.zeros(0, 4)).shape == (0, 4)
    flags = hvd.allgather(torch.tensor([rank == 0, True]))
    assert flags.tolist() == [True, True] + [False, True] * (size - 1)
    a, b = hvd.grouped_allgather([torch.tensor([rank]), torch.tensor([[rank * 2.0]])])
    equal(a, list(range(size)))
    equal(b, [[2.0 * other] for other in range(size)])
    assert len(hvd.synchronize(hvd.grouped_allgather_async([a, b]))) == 2


def broadcast_gives_the_roots(rank: int, size: int) -> None:
    root = size - 1
    x = torch.tensor([rank, rank * 10])
    equal(hvd.broadcast(x, root), [root, root * 10])
    equal(x, [rank, rank * 10])
    assert hvd.broadcast_(x, root) is x
    equal(x, [root, root * 10])
    y = torch.tensor([rank == root])
    hvd.synchronize(hvd.broadcast_async_(y, root))
    assert y.item() is True
    with pytest.raises(ValueError, match=f"root_rank is {size}; want one of the ranks"):
        hvd.broadcast(x, size)


def alltoall_gives_each_its_rows(rank: int, size: int) -> None:
    even = torch.arange(size) + 10 * rank
    equal(hvd.alltoall(even), [10 * other + rank for other in range(size)])
    # Rank r sends r + 1 rows to each.
    rows = torch.full((size * (rank + 1), 2), float(rank))
    found, received = hvd.alltoall(rows, splits=torch.tensor([rank + 1] * size))
    equal(found, [[float(other)] * 2 for other in range(size) for _ in range(other + 1)])
    assert received.tolist() == [other + 1 for other in range(size)]
    found, received = hvd.alltoall(rows, splits=numpy.full(size, rank + 1))
    equal(found, [[float(other)] * 2 for other in range(size) for _ in range(other + 1)])
    assert received.tolist() == [other + 1 for other in range(size)]
    # Everything to rank 0.
    found, received = hvd.alltoall(torch.full((3,), rank), splits=[3] + [0] * (size - 1))
    equal(found, [other for other in range(size) for _ in range(3)] if rank == 0 else torch.zeros(0))
    assert received.tolist() == [3 if rank == 0 else 0] * size


def wrong_splits_are_told_on_all_ranks(rank: int, size: int) -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="with the rows as their sum"):
        hvd.alltoall(x, splits=[1] * (size - 1) + [9], name="m")
    with pytest.raises(ValueError, match=r"splits of torch\.float32; want whole numbers"):
        hvd.alltoall(x, splits=torch.ones(size))
    if size > 1:  # and where only one rank's are wrong
        with pytest.raises(ValueError, match=rf"rank {size - 1} has {size + 1} rows, which {size} ranks do not"):
            hvd.alltoall(torch.ones(size + (rank == size - 1)), name="m")
    equal(hvd.allreduce(x, op=hvd.Sum), [size, size])


def reducescatter_gives_each_its_part(rank: int, size: int) -> None:
    rows = size + 1  # which do not come out even: rank 0 gets one more
    x = torch.arange(rows, dtype=torch.float64).unsqueeze(1) + rank
    total = torch.arange(rows, dtype=torch.float64).unsqueeze(1) * size + size * (size - 1) / 2
    mine = total[:2] if rank == 0 else total[rank + 1 : rank + 2]
    equal(hvd.reducescatter(x, op=hvd.Sum), mine)
    equal(hvd.reducescatter(x), mine / size)
    equal(hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), mine * 6)
    equal(hvd.synchronize(hvd.reducescatter_async(x, op=hvd.Sum)), mine)
    a, b = hvd.grouped_reducescatter([x, x + 1], op=hvd.Sum)
    equal(a, mine)
    equal(b, mine + size)
    assert len(hvd.synchronize(hvd.grouped_reducescatter_async([x]))) == 1
    with pytest.raises(ValueError, match=r"want hvd\.Average or hvd\.Sum"):
        hvd.reducescatter(x, op=hvd.Max)
    with pytest.raises(RuntimeError, match=r"op=hvd\.Adasum; use hvd\.allreduce"):
        hvd.reducescatter(x, op=hvd.Adasum)


def gradients_are_horovods(rank: int, size: int) -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def gradient(output: torch.Tensor, weights: Any) -> torch.Tensor:
        (found,) = torch.autograd.grad((output * torch.as_tensor(weights)).sum(), x)
        return found

    mean = (size + 1) / 2  # of rank + 1
    equal(gradient(hvd.allreduce(x, op=hvd.Sum), rank + 1.0), [mean * size] * 2)
    equal(gradient(hvd.allreduce(x), rank + 1.0), [mean] * 2)
    equal(gradient(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 1.0), [6.0 * size] * 2)
    equal(gradient(torch.stack(hvd.grouped_allreduce([x, 2 * x])), rank + 1.0), [3 * mean] * 2)
    # The mean over ranks of the gradient of this rank's rows.
    weights = torch.arange(2.0 * size) + rank
    equal(gradient(hvd.allgather(x), weights), torch.arange(2.0 * size)[2 * rank : 2 * rank + 2] + (size - 1) / 2)
    equal(gradient(hvd.broadcast(x, 0), rank + 1.0), [mean if rank == 0 else 0.0] * 2)
    weights = torch.arange(2.0 * size).view(size, 2)
    rows = x.unsqueeze(0).expand(size, 2)
    # Rank r's row for rank s is that one's row r, whose weights are 2 r and 2 r + 1.
    equal(gradient(hvd.alltoall(rows.contiguous()), weights), [2.0 * rank * size, (2.0 * rank + 1) * size])
    tall = x.repeat(size)
    equal(gradient(hvd.reducescatter(tall, op=hvd.Sum), rank + 1.0), [size * size * mean] * 2)
    equal(gradient(hvd.reducescatter(tall), rank + 1.0), [size * mean] * 2)
    with pytest.raises(NotImplementedError, match=r"use hvd\.Average or hvd\.Sum"):
        gradient(hvd.allreduce(x, op=hvd.Max), 1.0)


def objects_go_from_one_to_all_and_from_all_to_all(rank: int, size: int) -> None:
    root = size - 1
    assert hvd.broadcast_object({"rank": rank}, root_rank=root) == {"rank": root}
    assert hvd.broadcast_object({"big": "x" * 100_000} if rank == 0 else None) == {"big": "x" * 100_000}
    assert hvd.allgather_object("r" * rank) == ["r" * other for other in range(size)]


def everybody_knows_who_is_where(rank: int, size: int) -> None:
    assert hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.is_homogeneous()
    hvd.init()  # again changes nothing
    assert (hvd.rank(), hvd.size()) == (rank, size)
    built = (hvd.mpi_built(), hvd.nccl_built(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built(), hvd.mpi_enabled())
    assert built == (False,) * 6
    assert hvd.mpi_threads_supported() is False
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert hvd.cuda_built() == torch.cuda.is_available()
    with pytest.raises(
        AttributeError, match=r"horovod\.torch\.start_timeline is not served by lagom; set HOROVOD_TIME"
    ):
        _ = hvd.start_timeline
    hvd.shutdown()
    with pytest.raises(NotImplementedError, match=r"use hvd\.ProcessSet"):
        hvd.init(comm=object())
    hvd.init()


def process_sets_exchange_among_themselves(rank: int, size: int) -> None:
    ranks = list(range(max(1, size - 1)))
    if ranks == hvd.global_process_set.ranks:
        with pytest.raises(ValueError, match="there is a process set of the ranks"):
            hvd.add_process_set(ranks)
        return
    some = hvd.ProcessSet(ranks)
    assert (some.size(), some.rank()) == (None, None)
    with pytest.raises(ValueError, match="is not known"):
        hvd.allreduce(torch.ones(1), process_set=some)
    assert hvd.add_process_set(some) is some
    last = hvd.add_process_set([size - 1])
    x = torch.tensor([rank + 1.0])
    assert some.included() == (rank in ranks)
    if some.included():
        assert (some.size(), some.rank()) == (len(ranks), rank)
        equal(hvd.allreduce(x, process_set=some, op=hvd.Sum), [sum(range(1, size))])
        equal(hvd.allgather(x, process_set=some), [other + 1.0 for other in ranks])
        equal(hvd.broadcast(x, size - 2, process_set=some), [size - 1.0])
        hvd.barrier(process_set=some)
        assert hvd.broadcast_object(rank, 0, process_set=some) == 0
    else:
        assert some.rank() == -1
        equal(hvd.allreduce(x, process_set=last, op=hvd.Sum), [size])
        with pytest.raises(hvd.HorovodInternalError, match="is not one of the ranks"):
            hvd.allreduce(x, process_set=some)
    with pytest.raises(ValueError, match="want some of the"):
        hvd.add_process_set([size])
    mine = last if rank == size - 1 else some
    equal(hvd.allreduce(torch.tensor([3.0]), process_set=mine, op=hvd.Adasum), [3.0])  # parallel: the mean
    hvd.barrier()
    assert hvd.remove_process_set(some)
    assert not hvd.remove_process_set(some)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert some.size() is None


def adasum_is_the_papers(rank: int, size: int) -> None:
    # The third is at right angles to the sum of the others, which is added first.
    vectors = [torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.2, 0.0, -2.52])]
    found = hvd.allreduce(vectors[rank], op=hvd.Adasum)
    # a.b = 8, |a|^2 = 25, |b|^2 = 5: (1 - 8/50) a + (1 - 8/10) b.
    wanted = [0.84 * 3, 0.84 * 4 + 0.2 * 2, 0.2] if size > 1 else [3.0, 4.0, 0.0]
    if size == 3:
        wanted = [wanted[0] + 0.2, wanted[1], 0.2 - 2.52]
    torch.testing.assert_close(found, torch.tensor(wanted))
    right_angles = torch.tensor([[1.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 2.0]])[rank]
    equal(hvd.allreduce(right_angles, op=hvd.Adasum), [[1.0, 0.0, 0.0], [1.0, 5.0, 0.0], [1.0, 5.0, 2.0]][size - 1])
    equal(hvd.allreduce(torch.tensor([2.0, 6.0]), op=hvd.Adasum), [2.0, 6.0])  # parallel: the mean
    zero = hvd.allreduce(torch.tensor([float(rank == 0), 0.0]), op=hvd.Adasum)  # the others have nothing
    equal(zero, [1.0, 0.0])
    # Each tensor of a group by itself.
    both = hvd.grouped_allreduce([vectors[rank], right_angles], op=hvd.Adasum)
    torch.testing.assert_close(both[0], torch.tensor(wanted))
    with pytest.raises(ValueError, match="want floating-point numbers"):
        hvd.allreduce(torch.ones(1, dtype=torch.int64), op=hvd.Adasum)


def many_names_are_more_than_a_round_holds_at_first(rank: int, size: int) -> None:
    handles = [hvd.allreduce_async(torch.tensor([float(at + rank)]), name=f"{'long' * 20} {at}") for at in range(300)]
    for at, handle in enumerate(handles):
        equal(hvd.synchronize(handle), [at + (size - 1) / 2])


def nothing_is_possible_before_init_and_after_shutdown(rank: int, size: int) -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, hvd.join, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)"):
            call()
    hvd.init()
    equal(hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum), [size * (size + 1) / 2])


CHECKS: list[Check] = [
    allreduce_reduces_by_every_op,
    allreduce_scales_before_and_after,
    allreduce_keeps_types_and_shapes,
    allreduce_compresses_to_half_precision,
    allreduce_works_in_place_and_in_groups,
    handles_are_polled_and_synchronized_once,
    names_may_come_in_another_order_on_each_rank,
    a_name_under_way_is_refused_a_second_time,
    ranks_that_disagree_are_told_on_all_of_them,
    allgather_takes_ragged_rows,
    broadcast_gives_the_roots,
    alltoall_gives_each_its_rows,
    wrong_splits_are_told_on_all_ranks,
    reducescatter_gives_each_its_part,
    gradients_are_horovods,
    objects_go_from_one_to_all_and_from_all_to_all,
    process_sets_exchange_among_themselves,
    adasum_is_the_papers,
    many_names_are_more_than_a_round_holds_at_first,
    everybody_knows_who_is_where,
    nothing_is_possible_before_init_and_after_shutdown,
]
check = checked(CHECKS)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", [each.__name__ for each in CHECKS])
def test_exchange(name: str, world_size: int) -> None:
    check(name, world_size)
