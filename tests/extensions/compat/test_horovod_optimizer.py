"""Horovod's optimizer, its broadcasts, BatchNorm and elastic states: expected values are computed by hand."""

from __future__ import annotations

import contextlib
import copy
import threading
import types
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lagom.extensions.compat.horovod.torch as hvd
from lagom.extensions.compat.horovod import elastic
from lagom.extensions.compat.horovod.exchange import Entry
from lagom.extensions.compat.horovod.matching import Request
from lagom.extensions.compat.horovod.process_sets import negotiator_of
from tests.extensions.compat.horovod_ranks import WORLDS, Check, checked


class Line(nn.Module):
    """Two weights, of which the gradient of ``forward(x).sum()`` is known; and one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.tensor(7.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute for ``x`` of shape (2,); the weights' gradients are x, the bias's is 1."""
        return (self.weight * x).sum() + self.bias


def made(lr: float = 1.0, **settings: Any) -> tuple[Line, Any]:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **settings)


def inputs(rank: int) -> torch.Tensor:
    return torch.tensor([rank + 1.0, 3.0 * rank], dtype=torch.float64)


def weights(model: Line) -> list[float]:
    return [*model.weight.tolist(), model.bias.item(), model.unused.item()]


def close(found: Any, wanted: Any) -> None:
    found = torch.as_tensor(found, dtype=torch.float64)
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def a_step_takes_the_mean_of_gradients(rank: int, size: int) -> None:
    model, optimizer = made()
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    m = (size - 1) / 2  # mean rank
    for step in (1, 2):
        optimizer.zero_grad()
        model(inputs(rank)).backward()
        optimizer.step()
        close(weights(model), [1 - step * (m + 1), 2 - step * 3 * m, 0.5 - step, 7.0])
    with torch.no_grad():
        model.weight.zero_()
    summed, optimizer = made(op=hvd.Sum)
    summed(inputs(rank)).backward()
    optimizer.step()
    close(weights(summed), [1 - size * (m + 1), 2 - size * 3 * m, 0.5 - size, 7.0])


def a_rank_may_use_other_parameters(rank: int, size: int) -> None:
    model, optimizer = made()
    (model(inputs(rank)) + (model.unused if rank == size - 1 else 0)).backward()
    optimizer.step()
    close(model.unused.item(), 7 - 1 / size)
    # Nobody has a gradient of it: with several ranks it is zero.
    optimizer.zero_grad()
    model(inputs(rank)).backward()
    optimizer.step()
    close(model.unused.item(), 7 - 1 / size)


def gradients_are_divided_before_and_after(rank: int, size: int) -> None:
    model, optimizer = made(gradient_predivide_factor=4.0)
    model(inputs(rank)).backward()
    optimizer.step()
    close(weights(model)[:3], [1 - (size + 1) / 2, 2 - 3 * (size - 1) / 2, -0.5])
    with pytest.raises(ValueError, match=r"wants op=hvd\.Average"):
        made(gradient_predivide_factor=2.0, op=hvd.Sum)


def gradients_travel_in_half_precision(rank: int, size: int) -> None:
    model, optimizer = made(compression=hvd.Compression.fp16)
    (model(inputs(rank)) * (1 + 2.0**-14)).backward()  # half precision has 11 bits
    optimizer.step()
    assert model.weight.dtype == torch.float64
    given = 1 + 2.0**-14 if size == 1 else 1.0  # alone nothing travels
    close(weights(model)[:3], [1 - (size + 1) / 2 * given, 2 - 3 * (size - 1) / 2 * given, 0.5 - given])


def several_backwards_make_a_step(rank: int, size: int) -> None:
    model, optimizer = made(backward_passes_per_step=2)
    m = (size - 1) / 2
    for _ in range(2):
        optimizer.zero_grad()
        start = weights(model)
        model(inputs(rank)).backward()
        model(2 * inputs(rank)).backward()
        optimizer.step()
        close(weights(model)[:3], [start[0] - 3 * (m + 1), start[1] - 9 * m, start[2] - 2])
    if size > 1:
        model(inputs(rank)).backward()
        model(inputs(rank)).backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            model(inputs(rank)).backward()
        optimizer.step()
    # A step after fewer takes what there is.
    optimizer.zero_grad()
    start = weights(model)
    model(inputs(rank)).backward()
    optimizer.step()
    close(weights(model)[:3], [start[0] - (m + 1), start[1] - 3 * m, start[2] - 1])
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    model(inputs(rank)).backward()
    optimizer.step()
    close(weights(model)[2], start[2] - 2)
    with pytest.raises(ValueError, match="want 1 or more"):
        made(backward_passes_per_step=0)


def clipping_comes_between_synchronize_and_step(rank: int, size: int) -> None:
    model, optimizer = made()
    model(inputs(rank)).backward()
    optimizer.synchronize()
    m = (size - 1) / 2
    close(model.weight.grad, [m + 1, 3 * m])
    norm = ((m + 1) ** 2 + (3 * m) ** 2 + 1) ** 0.5
    close(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item(), norm)
    with optimizer.skip_synchronize():
        optimizer.step()
    close(weights(model)[2], 0.5 - 0.5 / (norm + 1e-6))
    if size > 1:
        optimizer.zero_grad()
        model(inputs(rank)).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"called without optimizer\.skip_synchronize"):
            optimizer.step()


def mistakes_are_told(rank: int, size: int) -> None:
    model, optimizer = made()
    model(inputs(rank)).backward()
    if size > 1:
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss\.backward"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            model(inputs(rank)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    named = list(model.named_parameters())
    cases: list[tuple[Any, str]] = [
        ({"named_parameters": [*named, ("bias", model.weight)]}, "must be unique. Found duplicates: bias"),
        ({"named_parameters": named[:1]}, "2 of them, first number 1 of group 0"),
        ({"named_parameters": [parameter for _, parameter in named]}, "sequence of tuples"),
        ({"groups": -1}, "want a number, 0 or more"),
        ({"groups": [[1]]}, r"groups must consist of torch\.Tensor"),
        ({"groups": [[model.bias], [model.bias]]}, "only appear once"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(plain, **settings)
    if size > 1:
        with pytest.raises(ValueError, match="LBFGS goes by the loss"):
            hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="cannot broadcast"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)


def two_optimizers_do_not_mix(rank: int, size: int) -> None:
    first, second = Line(), Line()
    m = (size - 1) / 2
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            named_parameters=[(f"{place}.{name}", one) for name, one in model.named_parameters()],
        )
        for place, model in enumerate((first, second))
    ]
    # One backward for both, and steps in another order on each rank: names find each other.
    (first(inputs(rank)) + 2 * second(inputs(rank)) + 0 * first.unused + 0 * second.unused).backward()
    for optimizer in optimizers if rank % 2 else reversed(optimizers):
        optimizer.step()
    close(weights(first)[:2], [1 - (m + 1), 2 - 3 * m])
    close(weights(second)[:2], [1 - 2 * (m + 1), 2 - 6 * m])


def sparse_gradients_are_gathered_or_made_dense(rank: int, size: int) -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
        start = table.weight.detach().clone()
        plain = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, sparse_as_dense=as_dense)
        # Row 0 twice, and a row of the rank's own.
        table(torch.tensor([0, 0, rank + 1])).sum().backward()
        optimizer.step()
        wanted = start.clone()
        wanted[0] -= 2.0
        wanted[1 : size + 1] -= 1 / size
        close(table.weight.detach(), wanted)
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse


def other_settings_change_no_number(rank: int, size: int) -> None:
    m = (size - 1) / 2
    settings: dict[str, Any]
    for settings in ({"groups": 2}, {"groups": []}, {"num_groups": 1}):
        model, optimizer = made(**settings)
        model(inputs(rank)).backward()
        optimizer.step()
        close(weights(model)[:2], [1 - (m + 1), 2 - 3 * m])
    unnamed = Line()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(unnamed.parameters(), lr=1.0))
    optimizer.add_param_group({"params": [extra := nn.Parameter(torch.tensor(1.0, dtype=torch.float64))]})
    optimizer.zero_grad()
    optimizer.synchronize()  # sees the new one
    with optimizer.skip_synchronize():
        optimizer.step()  # of zeros
    optimizer.zero_grad()
    (unnamed(inputs(rank)) * 1 + rank * extra).backward()
    optimizer.step()
    close(weights(unnamed)[:2], [1 - (m + 1), 2 - 3 * m])
    close(extra.item(), 1 - m)


def a_closure_is_synchronized_and_schedulers_go_on(rank: int, size: int) -> None:
    model = Line()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)  # of the optimizer before it was wrapped
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(inputs(rank))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    close(loss.item(), (rank + 1) + 6 * rank + 0.5)
    close(weights(model)[2], -0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    optimizer.step(closure)
    close(weights(model)[2], -1.0)  # half the rate


def states_survive_the_wrapping_and_the_checkpoint(rank: int, size: int) -> None:
    model = Line()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    model(inputs(0)).backward()
    plain.step()
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    assert optimizer.state[model.bias]["step"] == 1
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    model(inputs(rank)).backward()
    optimizer.step()
    assert optimizer.state[model.bias]["step"] == 2
    optimizer.load_state_dict(saved)
    assert optimizer.state[model.bias]["step"] == 1
    model(inputs(rank)).backward()
    optimizer.step()
    close(hvd.allgather(model.weight.detach().unsqueeze(0)), model.weight.detach().expand(size, 2))


def adasum_adds_up_what_steps_change(rank: int, size: int) -> None:
    model, optimizer = made(lr=0.5, op=hvd.Adasum)
    optimizer.zero_grad()
    model(inputs(rank) if rank < 2 else 0 * inputs(rank)).backward()  # the third has a gradient of the bias alone
    optimizer.step()
    # The steps: of the weights -0.5 (1, 0) and -0.5 (2, 3), whose product is 0.5, and squares 0.25 and 3.25.
    a, b = (1 - 0.5 / 0.25 / 2, 1 - 0.5 / 3.25 / 2) if size > 1 else (1.0, 0.0)
    close(weights(model), [1 - 0.5 * (a + 2 * b), 2 - 0.5 * 3 * b, 0.0, 7.0])
    if size > 1:
        with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
            pass
        model(inputs(rank)).backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.step()
        optimizer.step(lambda: None)


def parameters_and_states_are_those_of_the_root(rank: int, size: int) -> None:
    root = size - 1
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    model[1].num_batches_tracked.fill_(rank + 5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert all((parameter == root).all() for parameter in model.parameters())
    assert model[1].num_batches_tracked.item() == root + 5
    for given in (model.named_parameters(), list(model.parameters())):
        with torch.no_grad():
            model[0].weight.fill_(rank)
        hvd.broadcast_parameters(given, root_rank=root)
        assert (model[0].weight == root).all()
    with pytest.raises(ValueError, match="broadcast_parameters takes tensors"):
        hvd.broadcast_parameters({"epoch": 3}, 0)
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(3, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == root:  # only the root has a state
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(wrapped, root_rank=root, model=model)
    close(wrapped.param_groups[0]["lr"], 0.1 * size)
    close(optimizer.param_groups[0]["lr"], 0.1 * size)
    state = wrapped.state[model[0].weight]
    assert state["step"] == 1
    averages = hvd.allgather(state["exp_avg"].unsqueeze(0))
    assert (averages == averages[root]).all()
    stateless = torch.optim.SGD(model.parameters(), lr=rank + 1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(stateless, 0)
    assert stateless.param_groups[0]["lr"] == 1.0
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def unequal_numbers_of_batches_end_with_join(rank: int, size: int) -> None:
    model, optimizer = made()
    for batch in range(rank + 1):  # rank 0 has one, rank 1 two, ...
        optimizer.zero_grad()
        model(torch.tensor([10.0 * rank + batch, 0.0], dtype=torch.float64)).backward()
        optimizer.step()
    found = hvd.allreduce_async(torch.tensor([rank + 1.0]), op=hvd.Sum, name="before")  # done by who has not joined
    assert hvd.join() == size - 1
    # Means are of all ranks, with zeros for those that have joined.
    steps = [sum(10.0 * other + batch for other in range(batch, size)) / size for batch in range(rank + 1)]
    close(model.weight[0].item(), 1 - sum(steps))
    close(model.bias.item(), 0.5 - sum((size - batch) / size for batch in range(rank + 1)))
    close(hvd.synchronize(found), [size * (size + 1) / 2])
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    close(hvd.allgather(model.bias.detach().reshape(1)), [model.bias.item()] * size)
    assert hvd.join() == size - 1  # again, at once


def only_reductions_go_on_after_join(rank: int, size: int) -> None:
    if size == 1:
        return
    if rank == 0:
        assert hvd.join() == size - 1
        return
    x = torch.full((2,), rank + 1.0, dtype=torch.float64)
    others = sum(range(2, size + 1))
    for call in (
        lambda: hvd.allgather(x, name="j"),
        lambda: hvd.broadcast(x, 1, name="j"),
        lambda: hvd.alltoall(x, splits=[2] + [0] * (size - 1), name="j"),
        lambda: hvd.reducescatter(x, name="j"),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=r"not to be had once a rank has called join\(\)"):
            call()
    close(hvd.allreduce(x, op=hvd.Sum, name="s"), [others] * 2)
    close(hvd.allreduce(x, name="a"), [others / size] * 2)
    close(hvd.allreduce(x, op=hvd.Min, name="m"), [0.0] * 2)  # of the zeros too
    if rank == 2:  # rank 1 joins meanwhile
        close(hvd.allreduce(x, op=hvd.Sum, name="alone"), [3.0] * 2)
    assert hvd.join() == size - 1


def zeros_of_a_joined_rank_are_on_its_gpu(rank: int, size: int) -> None:
    """With stand-ins for CUDA: the program's thread uses GPU ``rank + 1``, and a new thread GPU 0."""
    if size == 1:
        return
    here = threading.get_ident()
    used = []
    stream = types.SimpleNamespace(wait_event=lambda _: None, record_event=lambda: None)

    def make_stream(device: torch.device) -> Any:
        used.append(device.index)
        return stream

    cuda: dict[str, Any] = {
        "is_initialized": lambda: True,
        "current_device": lambda: rank + 1 if threading.get_ident() == here else 0,
        "Stream": make_stream,
        "stream": contextlib.nullcontext,
    }
    zeros = torch.zeros
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda")),
        mock.patch.object(torch, "zeros", lambda *shape, device="cpu", **options: zeros(*shape, **options)),
        mock.patch.object(torch.Tensor, "record_stream", return_value=None),
    ):
        if rank == size - 1:
            negotiator = negotiator_of(hvd.global_process_set)
            entry = Entry(Request("on a GPU", "allreduce", "float32", (1,), 4, "cuda", "sum"), torch.ones(1))
            negotiator.submit(entry)
            negotiator.wait(entry)
            assert entry.result is not None
            close(entry.result, [1.0])
        assert hvd.join(*[7] * (rank == 1)) == size - 1
    assert rank == size - 1 or used == [7 if rank == 1 else rank + 1]


def batchnorm_is_of_all_ranks(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(3 * size + 2, 3, 2, dtype=torch.float64, generator=generator)
    cuts = [0, *(3 * other + 2 for other in range(1, size)), len(whole)]  # rank 0 has five samples, the others three
    mine = whole[cuts[rank] : cuts[rank + 1]].clone().requires_grad_()
    plain: Any = nn.BatchNorm1d(3).double()
    synced: Any = hvd.SyncBatchNorm(3).double()
    for norm in (plain, synced):
        nn.init.constant_(norm.weight, 1.5)
    judge = whole.clone().requires_grad_()
    wanted = plain(judge)
    factors = torch.arange(whole.numel(), dtype=torch.float64).view_as(whole)
    (wanted * factors).sum().backward()
    found = synced(mine)
    (found * factors[cuts[rank] : cuts[rank + 1]]).sum().backward()
    close(found.detach(), wanted[cuts[rank] : cuts[rank + 1]].detach())
    assert judge.grad is not None
    close(mine.grad, judge.grad[cuts[rank] : cuts[rank + 1]])
    close(synced.running_mean, plain.running_mean)
    close(synced.running_var, plain.running_var)
    assert synced.num_batches_tracked == plain.num_batches_tracked == 1
    # Gradients of its own parameters are the rank's; the optimizer adds them up.
    close(hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad)
    close(hvd.allreduce(synced.bias.grad, op=hvd.Sum), plain.bias.grad)
    synced.eval(), plain.eval()
    close(synced(mine).detach(), plain(mine).detach())
    with pytest.raises(ValueError, match="want samples, channels"):
        synced(torch.zeros(3))


def elastic_programs_start_from_rank_0s_state(rank: int, size: int) -> None:
    model, optimizer = made(lr=1.0 + rank)
    with torch.no_grad():
        model.bias.fill_(rank)
    sampler = elastic.ElasticSampler(range(7), shuffle=False)
    if rank == 0:
        sampler.record_batch(0, 1)
    state: Any = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=rank, batch=0)
    state.register_reset_callbacks([lambda: pytest.fail("ranks never change")])

    @hvd.elastic.run
    def train(state: Any, factor: int) -> Any:
        assert (state.epoch, state.model.bias.item()) == (0, 0.0)  # rank 0's
        assert state.optimizer.param_groups[0]["lr"] == 1.0
        assert state.sampler.processed_num == size
        state.epoch = 3
        state.commit()
        state.check_host_updates()
        return factor * state.epoch

    assert train(state, 2) == 6
    plain: Any = elastic.ObjectState(epoch=rank + 1)
    plain.sync()
    assert plain.epoch == 1
    sampler.set_epoch(0)
    # Every size-th, from the front again where they do not come out even.
    per_rank = -(-7 // size)
    assert list(sampler) == [at % 7 for at in range(rank, per_rank * size, size)]
    sampler.record_batch(0, 2)
    sampler.reset()
    assert sampler.remaining_indices == list(range(2 * size, 7))
    assert len(sampler) == -(-(7 - 2 * size) // size)
    few = elastic.ElasticSampler(range(1))  # fewer than ranks
    assert list(few) == [0]
    few.record_batch(0, 1)
    few.reset()
    assert list(few) == []
    shuffled = elastic.ElasticSampler(range(20), seed=3)
    everything = hvd.allgather(torch.tensor(list(shuffled)))
    assert set(everything.tolist()) == set(range(20))
    first = list(shuffled)
    shuffled.set_epoch(1)
    assert list(shuffled) != first


CHECKS: list[Check] = [
    a_step_takes_the_mean_of_gradients,
    a_rank_may_use_other_parameters,
    gradients_are_divided_before_and_after,
    gradients_travel_in_half_precision,
    several_backwards_make_a_step,
    clipping_comes_between_synchronize_and_step,
    mistakes_are_told,
    two_optimizers_do_not_mix,
    sparse_gradients_are_gathered_or_made_dense,
    other_settings_change_no_number,
    a_closure_is_synchronized_and_schedulers_go_on,
    states_survive_the_wrapping_and_the_checkpoint,
    adasum_adds_up_what_steps_change,
    parameters_and_states_are_those_of_the_root,
    unequal_numbers_of_batches_end_with_join,
    only_reductions_go_on_after_join,
    zeros_of_a_joined_rank_are_on_its_gpu,
    batchnorm_is_of_all_ranks,
    elastic_programs_start_from_rank_0s_state,
]
check = checked(CHECKS)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", [each.__name__ for each in CHECKS])
def test_optimizer(name: str, world_size: int) -> None:
    check(name, world_size)
