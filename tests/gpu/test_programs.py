"""Programs on a CUDA device, besides plain steps: compiled models, graphs, checks, little memory."""

from __future__ import annotations

import importlib.util
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError
from tests.gpu.test_cuda import train as train_without_gpu
from tests.gpu.test_shared_gpu import held_by_libraries

pytestmark = pytest.mark.gpu

MB = 1 << 20


def on_one(function: Any, **more: Any) -> Any:
    settings: dict[str, Any] = {"world_size": 1, "launcher": "local", "seed": 0}
    return experiment.lagom(function, TorchDistributedConfig(**(settings | more)))


def steady(width: int, pin_memory: bool, first: int = 5) -> tuple[list[float], str]:
    """Take 15 steps with batches from the CPU; return losses and device.

    Args:
        first: number of the first step, from 0 on, in which the host may not wait for the device.
    """
    module = torch.get_device_module()
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.rand(240, width), torch.rand(240, 1))
    losses = []
    try:
        for step, (x, y) in enumerate(DataLoader(data, batch_size=16, pin_memory=pin_memory)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if step + 1 == first:
                module.set_sync_debug_mode("error")
    finally:
        module.set_sync_debug_mode("default")
    return [float(loss) for loss in losses], str(losses[0].device)


@pytest.mark.parametrize("width", [8, 2048])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_no_steady_step_of_a_program_waits_for_the_gpu(width: int, pin_memory: bool) -> None:
    losses, device = on_one(steady, hparams={"width": width, "pin_memory": pin_memory}).value
    assert (len(losses), device) == (15, "cuda:0")


def compiled(mode: str | None) -> torch.Tensor:
    """Train a model that torch compiles, or not."""
    warnings.simplefilter("ignore")  # torch's, of its own modules
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
    fast: Any = torch.compile(model, mode=mode) if mode else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.rand(128, 16), torch.rand(128, 1)), batch_size=16)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(fast(x.cuda()), y.cuda()).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_model_with_cuda_graphs_trains_as_without(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(["0"] * world_size))
    torch.manual_seed(0)
    plain = compiled(None)
    found = on_one(compiled, world_size=world_size, hparams={"mode": "reduce-overhead"}).value
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


def recorded() -> None:
    """Record a backward in a CUDA graph."""
    x = torch.ones(3, device="cuda", requires_grad=True)
    x.square().sum().backward()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.square().sum().backward()


def test_a_graph_that_records_a_backward_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(LagomError, match="a CUDA graph records this backward"):
        on_one(recorded, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rehearsal_finds_no_difference(world_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(["0"] * world_size))
    found = on_one(train_without_gpu, world_size=world_size, hparams={"epochs": 2}, verify=True, run_dir=tmp_path)
    assert found["devices"] == ["cuda:0"]


def whole_state(ballast: bool, kind: str = "cuda", width: int = 4096, room: int = 400 * MB) -> dict[str, Any]:
    """Ask for the state of a sharded model, where the device has room for it, or only ``room`` bytes."""
    module = torch.get_device_module(kind)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).to(kind)  # 512 MB
    x = torch.rand(2, width, device=kind)
    model(x).sum().backward()
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    model.zero_grad()
    module.empty_cache()
    model[0](x)  # the ranks wait for each other: rank 1 has given back its memory when rank 0 asks what is free
    held = None
    if ballast and lagom.rank() == 0:
        held = torch.empty(module.mem_get_info()[0] - room, dtype=torch.uint8, device=kind)
    model(x)  # rank 1 goes on when rank 0 has the memory
    state = model.state_dict()
    devices = sorted({value.device.type for value in state.values()})
    found = [float(value.double().sum()) for value in (v.cpu() for v in state.values())]
    del held
    return {"devices": devices, "sums": sums, "found": found}


@pytest.mark.parametrize(("ballast", "devices"), [(True, ["cpu"]), (False, ["cuda"])])
def test_a_state_that_does_not_fit_the_gpu_is_on_the_cpu(
    ballast: bool, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    found = on_one(whole_state, world_size=2, zero_lvl=3, batches="split", hparams={"ballast": ballast}).value
    assert found["devices"] == devices
    assert found["found"] == pytest.approx(found["sums"], rel=1e-6)


def too_large() -> None:
    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    torch.empty(1 << 42, dtype=torch.uint8, device="cuda")


def test_a_rank_that_runs_out_of_memory_says_what_it_held() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r"of its GPU\) it held 4.2 MB of parameters, 4.2 MB of gradients, 8.4 MB"
    ):
        on_one(too_large)


def predicted(kind: str = "cuda", width: int = 512, attends: bool = True) -> tuple[int, Any]:
    """The bytes that a step holds before its backward, and the plan of them."""
    module = torch.get_device_module(kind)
    layer: nn.Module = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    if not attends:
        layer = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.LayerNorm(4 * width), nn.Linear(4 * width, width)
        )
    x = torch.rand(16, width // 2, width)
    plan = lagom.plan_memory(layer, optimizer=torch.optim.AdamW, batch=x, world_size=1)
    layer.to(kind)
    libraries = held_by_libraries(kind)
    libraries -= sum(p.nbytes for p in layer.parameters())
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss = layer(x.to(kind)).sum()
        kept = int(module.memory_allocated()) - libraries
        loss.backward()
        optimizer.step()
    return kept, plan


def test_memory_is_planned_within_a_tenth() -> None:
    kept, plan = on_one(predicted, launcher="inline").value
    assert kept == pytest.approx(plan.needed(0), rel=0.1)


def busy() -> None:
    """Keep the GPU busy for four seconds."""
    x = torch.rand(4096, 4096, device="cuda")
    end = time.monotonic() + 4
    for _ in DataLoader(TensorDataset(torch.zeros(100_000))):
        x = x @ x / 4096
        torch.cuda.synchronize()
        if time.monotonic() > end:
            break


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
def test_the_use_of_the_gpu_is_told(tmp_path: Path) -> None:
    on_one(busy, run_dir=tmp_path)
    (told,) = tmp_path.glob("*/progress.jsonl")
    reports = [json.loads(line) for line in told.read_text().splitlines()]
    assert max(one["gpu"] or 0.0 for one in reports) > 0.5
    assert max(one["memory"] for one in reports) >= 4 * 4096 * 4096
