"""Whole runs of lagom on the test device: the numbers of one process on the CPU."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import CollectiveError
from tests.accelerator.device_processes import needs_device, with_driver
from tests.extensions.resume import training
from tests.extensions.resume.kills import killed
from tests.gpu import test_shared_gpu
from tests.gpu.test_programs import steady

pytestmark = needs_device


class Network(test_shared_gpu.Network):
    """The network of the tests on a GPU, with a mask that no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tensor([1.0] * 15 + [0.0], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask)


def train(device: str = "", pin: bool = False) -> dict[str, Any]:
    """A program that names the device, or knows of none; with an evaluation, and losses that are read late."""
    model = Network()
    x = torch.rand(50, 16, dtype=torch.float64)
    data = TensorDataset(x, (x.sum(dim=1) * 10).long() % 3)
    loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=pin)
    if device:
        model.to(device)
        model.mask = model.mask.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    losses, devices = [], set()
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            if device:
                inputs, targets = (one.to(device, non_blocking=True) for one in (inputs, targets))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
            devices |= {str(loss.device), str(next(model.parameters()).device)}
        model.eval()
        with torch.no_grad():
            for inputs, targets in DataLoader(data, batch_size=20):
                inputs, targets = (inputs.to(device), targets.to(device)) if device else (inputs, targets)
                losses.append(nn.functional.cross_entropy(model(inputs), targets))
    weights = torch.cat([value.detach().double().flatten().cpu() for value in model.state_dict().values()])
    return {"weights": weights, "losses": [loss.item() for loss in losses], "devices": sorted(devices)}


def plainly(function: Any = train, **hparams: Any) -> Any:
    """Run in this process, on the CPU."""
    torch.manual_seed(0)
    return function(**hparams)


def on_ranks(world_size: int, function: Any = train, **settings: Any) -> Any:
    config: dict[str, Any] = {"launcher": "local", "seed": 0, "world_size": world_size}
    return experiment.lagom(function, TorchDistributedConfig(**(config | settings)))


def check(result: Any, plain: dict[str, Any], rtol: float = 1e-9) -> None:
    torch.testing.assert_close(result["weights"], plain["weights"], rtol=rtol, atol=rtol / 100)
    assert result["losses"] == pytest.approx(plain["losses"], rel=rtol)
    for rank, found in enumerate(result.per_rank):
        assert found["devices"] == [f"lagomtest:{rank}"], result.per_rank
        assert torch.equal(found["weights"], result["weights"])


MORE_LEVELS = [((2, ""), 2), ((2, ""), 3), ((4, ""), 3)]


@pytest.mark.parametrize(
    ("world_size", "device", "settings"),
    [
        (2, "", {}),
        (2, "lagomtest", {}),
        (4, "", {}),
        (2, "", {"zero_lvl": 1}),
        # Level 3 is in the test of gradients that travel, too.
        *(pytest.param(*ranks, {"zero_lvl": level}, marks=pytest.mark.soak) for ranks, level in MORE_LEVELS),
        (2, "", {"batches": "split"}),
        (2, "", {"micro_batches": 2}),
    ],
)
@with_driver(4)
def test_ranks_with_a_device_each_have_the_numbers_of_one_process(
    world_size: int, device: str, settings: dict[str, Any]
) -> None:
    check(on_ranks(world_size, hparams={"device": device, "pin": True}, **settings), plainly())


def with_one_kind() -> tuple[Any, set[str]]:
    """Return the weights, and the kinds of devices in place of devices, which differ between ranks."""
    found = train()
    return found["weights"], {device.partition(":")[0] for device in found["devices"]}


@with_driver(4)
def test_a_rehearsal_finds_no_difference(tmp_path: Path) -> None:
    found, kinds = on_ranks(2, with_one_kind, verify=True, run_dir=tmp_path).value
    assert kinds == {"lagomtest"}
    torch.testing.assert_close(found, plainly()["weights"], rtol=1e-9, atol=1e-11)


def large() -> dict[str, Any]:
    """Gradients that travel while the backward runs: 4 MB of small ones in a bucket, then 8 MB for each layer."""
    torch.manual_seed(1)
    widths = [1024] * 4 + [256] * 10
    layers = (layer for before, after in itertools.pairwise(widths) for layer in (nn.Linear(before, after), nn.Tanh()))
    model = nn.Sequential(*layers, nn.Linear(256, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for (x,) in DataLoader(TensorDataset(torch.rand(32, 1024, dtype=torch.float64)), batch_size=8):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = torch.cat([parameter.detach()[:4].flatten().cpu() for parameter in model.parameters()])
    return {"weights": weights, "losses": [one.item() for one in losses], "devices": [str(model[0].weight.device)]}


@pytest.mark.parametrize("zero_lvl", [0, pytest.param(2, marks=pytest.mark.soak), 3])
@with_driver(4)
def test_gradients_that_travel_while_the_backward_runs(zero_lvl: Any) -> None:
    check(on_ranks(2, large, zero_lvl=zero_lvl), plainly(large))


def halves(asked: str) -> dict[str, Any]:
    """A program that asks lagom for mixed precision, or has autocast and a scaler of its own; one step overflows."""
    torch.manual_seed(0)
    device = torch.device("lagomtest")
    model = nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("lagomtest", init_scale=256.0, growth_interval=2, enabled=asked == "own")
    scales, losses = [], []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.linspace(0, 1, 64, device=device).reshape(8, 8)
        x[7, 0] = torch.inf if step == 3 and asked == "own" else 0.5
        with torch.autocast("lagomtest", torch.float16) if asked == "own" else nullcontext():
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.detach())
    return {"scales": scales, "weights": model.weight.detach().flatten().cpu(), "loss": losses[-1].item()}


@with_driver(4)
def test_a_scaler_skips_the_steps_that_one_process_skips() -> None:
    one, two = (on_ranks(world_size, halves, hparams={"asked": "own"}) for world_size in (1, 2))
    assert one["scales"] == two["scales"] == [256.0, 512.0, 512.0, 256.0, 256.0, 512.0]
    torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("asked", [pytest.param("bf16", marks=pytest.mark.soak), "fp16"])
@with_driver(4)
def test_mixed_precision_gives_about_the_numbers_of_one_rank(asked: Any) -> None:
    settings: dict[str, Any] = {"hparams": {"asked": ""}, "mixed_precision": asked}
    one, two = (on_ranks(world_size, halves, **settings) for world_size in (1, 2))
    full = on_ranks(1, halves, hparams={"asked": ""})
    torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-2, atol=1e-3)
    assert not torch.equal(one["weights"], full["weights"])


@pytest.mark.parametrize("pin_memory", [False, True])
@with_driver(4)
def test_no_steady_step_of_a_program_waits_for_the_device(pin_memory: bool) -> None:
    losses, device = on_ranks(1, steady, hparams={"width": 8, "pin_memory": pin_memory}).value
    assert (len(losses), device) == (15, "lagomtest:0")


@pytest.mark.parametrize("width", [pytest.param(8, marks=pytest.mark.soak), 1024])
@with_driver(4)
def test_no_steady_step_of_two_ranks_waits_for_the_device(width: int) -> None:
    """Steps 1, 2, 4, 8 and 16 compare the ranks' parameters; gradients of 4 MB travel while the backward runs."""
    hparams = {"width": width, "pin_memory": True, "first": 9}
    one = on_ranks(1, steady, hparams=hparams).value
    for rank, (losses, device) in enumerate(on_ranks(2, steady, hparams=hparams).per_rank):
        assert device == f"lagomtest:{rank}"
        assert losses == pytest.approx(one[0], rel=1e-5)


def dropped() -> list[float]:
    """Draw from the device's generator in a forward, and outside of one."""
    torch.manual_seed(0)
    device = torch.device("lagomtest")
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)).double().to(device)
    found = [model(torch.ones(12, 4, dtype=torch.float64, device=device)).sum().item() for _ in range(3)]
    return [*found, torch.rand((), device=device).item(), torch.rand(()).item()]


def drawn_apart() -> tuple[list[float], float, list[float]]:
    """Draw in forwards of a part of each batch, of equal rows, and on the device in between; return outputs last."""
    torch.manual_seed(0)
    first = nn.Linear(4, 64)
    model = nn.Sequential(first, nn.Dropout(0.5), nn.Linear(64, 1)).double()
    draws, outputs = [], []
    for (x,) in DataLoader(TensorDataset(torch.ones(12, 4, dtype=torch.float64)), batch_size=4):
        found = model(x)
        found.sum().backward()
        outputs.append(found.detach().sum().item())
        draws.append(torch.rand((), device=x.device).item())
    assert first.weight.grad is not None
    return draws, first.weight.grad.sum().item(), outputs


@with_driver(4)
def test_ranks_draw_equally_between_forwards_of_their_parts() -> None:
    """In forwards each draws masks of its own."""
    first, second = on_ranks(2, drawn_apart, batches="split").per_rank
    assert first[:2] == second[:2]
    assert not set(first[2][1:]) & set(second[2][1:])


@with_driver(4)
def test_draws_are_those_of_one_rank() -> None:
    one, two = on_ranks(1, dropped), on_ranks(2, dropped)
    assert two.per_rank[0] == two.per_rank[1]
    assert two.value == pytest.approx(one.value, rel=1e-9)


@with_driver(4)
def test_a_killed_rank_continues_from_a_snapshot_with_the_state_of_the_device(tmp_path: Path) -> None:
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    wanted = experiment.lagom(training.train, training.config(folders[0], world_size=2)).value
    (folders[1] / "slowly").touch()
    with killed(folders[1], 1):
        result = experiment.lagom(training.train, training.config(folders[1], world_size=2, snapshot_every_s=0.1))
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    assert [found["device"] for found in result.per_rank] == ["lagomtest:0", "lagomtest:1"]
    assert result["losses"] == wanted["losses"]
    assert result["weights"] == wanted["weights"]


def too_large() -> None:
    torch.get_device_module("lagomtest").set_total_memory(32 << 20)
    model = nn.Linear(1024, 1024).to("lagomtest")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 1024, device="lagomtest")).sum().backward()
    optimizer.step()
    torch.empty(32 << 20, dtype=torch.uint8, device="lagomtest")


@with_driver(4)
def test_a_rank_that_runs_out_of_memory_says_what_it_held() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"it held 4.2 MB of parameters, 4.2 MB of gradients, 8.4 MB"):
        on_ranks(1, too_large)


def tensors() -> Tensor:
    return torch.arange(5.0, device="lagomtest")


@with_driver(4)
def test_a_tensor_on_the_device_comes_home_from_a_rank() -> None:
    found = on_ranks(2, tensors).value
    assert found.device.type == "lagomtest"
    assert found.cpu().tolist() == [0, 1, 2, 3, 4]


def distributed(folder: str) -> tuple[str, list[float]]:
    """A program for accelerators with DDP, as people write it."""
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).to(torch.device("lagomtest", rank)))
    model(torch.full((3, 4), float(rank), device="lagomtest")).sum().backward()
    gradient = model.module.bias.grad
    assert gradient is not None
    found = dist.get_backend_config(dist.group.WORLD), gradient.tolist()
    dist.destroy_process_group()
    return found


@with_driver(4)
def test_a_program_with_ddp_has_the_backend_of_the_device(tmp_path: Path) -> None:
    for backend, gradient in on_ranks(2, distributed, hparams={"folder": str(tmp_path)}).per_rank:
        assert "lagomtest:lagomccl" in backend
        assert gradient == [3, 3]


def by_default(kind: str) -> dict[str, Any]:
    """A program that has torch make all tensors on the device, and draws on it."""
    torch.set_default_device(kind)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    x = torch.rand(48, 16, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    order, noise = torch.Generator(device=kind).manual_seed(1), torch.Generator(device=kind).manual_seed(2)
    losses = []
    for _ in range(2):
        for (rows,) in DataLoader(TensorDataset(x), batch_size=12, shuffle=True, generator=order):
            optimizer.zero_grad()
            rows = rows + torch.randn(rows.shape[1:], generator=noise, dtype=torch.float64)
            loss = nn.functional.cross_entropy(model(rows), (rows.sum(dim=1) * 10).long() % 3)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    return {"weights": weights, "losses": losses, "devices": [str(rows.device)]}


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.soak), {"batches": "split"}, {"zero_lvl": 3}], ids=str
)
@with_driver(4)
def test_a_default_device_of_the_program_is_for_the_program_alone(settings: dict[str, Any]) -> None:
    one = on_ranks(1, by_default, hparams={"kind": "lagomtest"})
    check(on_ranks(2, by_default, hparams={"kind": "lagomtest"}, **settings), one.value)


def on_the_first() -> float:
    """A program that names a device by its number."""
    model = nn.Linear(4, 1).to("lagomtest:0")
    model(torch.ones(2, 4, device="lagomtest:0")).sum().backward()
    return float(model.bias.grad)  # type: ignore[arg-type]


@with_driver(4)
def test_ranks_on_one_device_of_several_are_told_how_to_name_theirs() -> None:
    with pytest.raises(CollectiveError, match="two ranks use one device: name devices without a number"):
        on_ranks(2, on_the_first)


def penalised(pin: bool = False) -> dict[str, Any]:
    """A program that computes with parameters before the first forward of a batch."""
    torch.manual_seed(0)
    model = nn.Linear(16, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for (x,) in DataLoader(TensorDataset(torch.rand(24, 16, dtype=torch.float64)), batch_size=8, pin_memory=pin):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        optimizer.zero_grad()
        loss = model(x).square().mean() + 0.1 * penalty
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    return {"weights": weights, "losses": losses, "devices": [str(model.weight.device)]}


@with_driver(4)
def test_parameters_are_on_the_device_before_a_batch_is_computed() -> None:
    check(on_ranks(2, penalised), penalised())
