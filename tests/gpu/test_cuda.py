"""Tests that need a CUDA device; skipped without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.cluster import visible_gpus
from lagom.config import TorchDistributedConfig
from lagom.exchange.agreement_exchange import AgreedExchange
from lagom.exchange.group import Group
from lagom.forward.batchnorm import WholeBatchStatistics
from lagom.gradients.backward_gradients import BackwardGradients
from lagom.gradients.divergence import DivergenceMonitor
from lagom.gradients.gradient_averager import GradientAverager
from lagom.run_state.leaves import Leaves, Likeness
from lagom.run_state.loader_pass import BatchShare
from tests.programs import scaled
from tests.ranks import session_alone

pytestmark = pytest.mark.gpu

TIMEOUT = timedelta(seconds=60)


def train(epochs: int) -> dict[str, Any]:
    """A program that knows of no GPU: nothing in it is moved anywhere."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    points = torch.rand(50, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(points, points.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    devices = set()
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            devices |= {str(inputs.device), str(loss.device), str(next(model.parameters()).device)}
    return {
        "weights": torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()]),
        "devices": sorted(devices),
        "mask": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_a_program_that_knows_of_no_gpu_trains_on_it_with_the_numbers_of_the_cpu(launcher: Any) -> None:
    torch.manual_seed(0)
    plain = train(epochs=2)
    assert plain["devices"] == ["cpu"]
    torch.manual_seed(0)
    result = experiment.lagom(train, TorchDistributedConfig(world_size=1, launcher=launcher, hparams={"epochs": 2}))
    assert result["devices"] == ["cuda:0"]
    torch.testing.assert_close(result["weights"], plain["weights"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("asked", ["bf16", "fp16", True])
def test_mixed_precision_is_autocast_and_a_scaler_by_hand(asked: Any) -> None:
    dtype = torch.float16 if asked == "fp16" else torch.bfloat16
    config = TorchDistributedConfig(world_size=1, launcher="inline", mixed_precision=asked, hparams={"by_hand": None})
    found = experiment.lagom(half, config)
    torch.testing.assert_close(found["weights"], half(dtype)["weights"], rtol=0, atol=1e-6)


def half(by_hand: torch.dtype | None, kind: str = "cuda") -> dict[str, Any]:
    """Train with autocast, and for float16 with a scaler; by the program itself, or by lagom."""
    torch.manual_seed(0)
    device = torch.device(kind)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(kind, enabled=by_hand is torch.float16)
    points = torch.linspace(-1, 1, 256, device=device).reshape(-1, 4)
    for _ in range(20):
        optimizer.zero_grad()
        if by_hand is None:
            found = model(points)
        else:
            with torch.autocast(kind, by_hand):
                found = model(points).float()
        scaler.scale(torch.nn.functional.mse_loss(found, points.prod(dim=1, keepdim=True))).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"weights": torch.cat([p.detach().flatten().cpu() for p in model.parameters()])}


def test_a_local_rank_sees_the_one_gpu_it_was_given() -> None:
    result = experiment.lagom(train, TorchDistributedConfig(world_size=1, launcher="local", hparams={"epochs": 1}))
    assert result["mask"] == visible_gpus()[0]


def test_a_tensor_on_the_gpu_comes_home_from_a_rank() -> None:
    def on_gpu() -> torch.Tensor:
        return torch.arange(5.0, device="cuda")

    value = experiment.lagom(on_gpu, TorchDistributedConfig(world_size=1, launcher="local")).value
    assert value.cpu().tolist() == [0, 1, 2, 3, 4]


@contextmanager
def group_of_one() -> Iterator[Group]:
    """A group of one rank, whose tensors on the GPU go by NCCL."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), 0, 1, TIMEOUT)
    made: list[Any] = []

    def nccl(name: str) -> Any:
        made.append(dist.ProcessGroupNCCL(dist.PrefixStore(name, store), 0, 1, dist.ProcessGroupNCCL.Options()))
        return made[-1]

    try:
        yield Group(0, 1, lambda data, wanted=None: [data], lambda *_: gloo, nccl=nccl)
    finally:
        for one in made:
            one.shutdown()


def averager(group: Group) -> GradientAverager:
    leaves = Leaves()
    watch = DivergenceMonitor(group, leaves, list, {}, str)
    return GradientAverager(group, leaves, watch, AgreedExchange(group, 0), likeness=lambda _: Likeness.NONE, name=str)


def test_gradients_on_the_gpu_are_averaged_by_nccl() -> None:
    with group_of_one() as group:
        parameters = [torch.nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2)]
        pending = BackwardGradients()
        pending.expect(parameters)
        for parameter in parameters:
            parameter.grad = torch.full((3,), 2.0, device="cuda")
        averager(group).average_backward(pending)
        assert all(parameter.grad is not None and parameter.grad.tolist() == [2, 2, 2] for parameter in parameters)


def test_buckets_travel_by_nccl_while_a_backward_runs() -> None:
    with group_of_one() as group:
        check_buckets_leave_early(averager(group), group, "cuda")


def check_buckets_leave_early(averager: GradientAverager, group: Group, device: str) -> None:
    """The second backward sends the last parameter's bucket before it comes to the first parameter."""
    first, second = (torch.nn.Parameter(torch.full((1 << 21,), value, device=device)) for value in (3.0, 5.0))
    sent, seen = [], []
    all_reduce = group.all_reduce_aside

    def note(tensor: torch.Tensor) -> Any:
        sent.append(tensor.numel())
        return all_reduce(tensor)

    group.all_reduce_aside = note  # type: ignore[method-assign]
    for _ in range(2):
        first.grad = second.grad = None
        middle = first * 2
        middle.register_hook(lambda _: seen.append(len(sent)))
        loss = (middle * second).sum()
        pending = BackwardGradients()
        pending.expect([first, second])
        averager.begin_backward(pending)
        loss.backward()
        averager.average_backward(pending)
        assert first.grad is not None
        assert second.grad is not None
        assert torch.equal(first.grad, torch.full_like(first, 10.0))
        assert torch.equal(second.grad, torch.full_like(second, 6.0))
    assert seen == [0, 1]
    assert sent == [1 << 21] * 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("size", [8, 1 << 21])
def test_no_steady_step_waits_for_the_gpu(size: int) -> None:
    """Small gradients, and such as travel while the backward runs."""
    with group_of_one() as group:
        check_no_step_waits(averager(group), size, "cuda")


def check_no_step_waits(averaging: GradientAverager, size: int, device: str) -> None:
    """Take steps; steps 8 and 16 compare the ranks' parameters."""
    module = torch.get_device_module(device)
    parameter = torch.nn.Parameter(torch.ones(size, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(1, 16):
        module.set_sync_debug_mode("error" if step > 8 else "default")
        try:
            optimizer.zero_grad()
            pending = BackwardGradients()
            pending.expect([parameter])
            averaging.begin_backward(pending)
            parameter.square().sum().backward()
            averaging.average_backward(pending)
            optimizer.step()
        finally:
            module.set_sync_debug_mode("default")
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((size,), 0.8**15))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_batchnorm_over_ranks_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    with group_of_one() as group:
        check_batchnorm_does_not_wait(group, tmp_path, "cuda:0")


def check_batchnorm_does_not_wait(group: Group, folder: Path, device: str) -> None:
    """Compare BatchNorm over a group of one rank with torch's."""
    session, module = session_alone(folder, device), torch.get_device_module(device)
    session.group = group
    session.forwards.sliced_forward = SimpleNamespace(share=BatchShare(16, 16, even=True))  # type: ignore[assignment]
    over_ranks = WholeBatchStatistics(session, torch.nn.functional.batch_norm)
    found, wanted = (torch.nn.BatchNorm1d(4).to(device).double() for _ in range(2))
    x, weights = torch.rand(16, 4, device=device, dtype=torch.float64), torch.rand(4, device=device).double()
    for step in range(3):
        module.set_sync_debug_mode("error" if step else "default")
        try:
            running = (found.running_mean, found.running_var, 0.1)
            given = x.clone().requires_grad_()
            (over_ranks.batch_norm(given, running, found.weight, found.bias, 1e-5) ** 3 * weights).sum().backward()
        finally:
            module.set_sync_debug_mode("default")
        other = x.clone().requires_grad_()
        (wanted(other) ** 3 * weights).sum().backward()
        torch.testing.assert_close(given.grad, other.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.running_var, wanted.running_var, rtol=1e-10, atol=0)


def test_mixed_precision_with_a_scaler_gives_the_numbers_of_a_plain_run() -> None:
    options: dict[str, Any] = {"epochs": 2, "device": "cuda", "dtype": torch.float32}
    torch.manual_seed(0)
    plain = scaled.train(**options)
    torch.manual_seed(0)
    result = experiment.lagom(scaled.train, TorchDistributedConfig(world_size=1, launcher="local", hparams=options))
    assert result["scale"] == plain["scale"]
    for name, value in plain["weights"].items():
        torch.testing.assert_close(result["weights"][name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)
