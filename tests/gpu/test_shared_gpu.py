"""Two ranks on one CUDA device: the numbers of one process, and the memory of each ``zero_lvl``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

pytestmark = pytest.mark.gpu

LAYERS, WIDTH = 6, 2048


@pytest.fixture(autouse=True)
def one_gpu_for_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")


def on_two(function: Any, hparams: dict[str, Any], **more: Any) -> Any:
    return experiment.lagom(
        function, TorchDistributedConfig(world_size=2, launcher="local", seed=0, hparams=hparams, **more)
    )


class Network(nn.Module):
    """Convolution, BatchNorm and layers large enough to be sharded, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
        self.last = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x[:, None]))
        return found


def train(device: str = "") -> dict[str, Any]:
    """A program that names the GPU, or knows of none."""
    model = Network()
    x = torch.rand(50, 16, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, (x.sum(dim=1) * 10).long() % 3), batch_size=16, shuffle=True)
    if device:
        model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    losses = []
    for _ in range(3):
        for inputs, targets in loader:
            inputs, targets = (inputs.to(device), targets.to(device)) if device else (inputs, targets)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    weights = torch.cat([value.detach().double().flatten().cpu() for value in model.state_dict().values()])
    return {"weights": weights, "losses": losses, "device": str(next(model.parameters()).device)}


@pytest.mark.parametrize("device", ["", "cuda", "cuda:0"])
def test_numbers_are_those_of_one_process(device: str) -> None:
    _compare(on_two(train, {"device": device}), plainly())


@pytest.mark.parametrize("zero_lvl", [1, 2, 3])
def test_numbers_of_sharded_models_are_those_of_one_process(zero_lvl: Any) -> None:
    _compare(on_two(train, {"device": ""}, zero_lvl=zero_lvl), plainly())


def test_rows_split_by_the_loader_give_the_numbers_of_one_process() -> None:
    result = on_two(train, {"device": ""}, batches="split")
    torch.testing.assert_close(result["weights"], plainly()["weights"], rtol=1e-9, atol=1e-11)


def plainly() -> dict[str, Any]:
    """Train in this process, on the CPU."""
    torch.manual_seed(0)
    return train()


def _compare(result: Any, plain: dict[str, Any]) -> None:
    assert result["device"] == "cuda:0"
    torch.testing.assert_close(result["weights"], plain["weights"], rtol=1e-9, atol=1e-11)
    assert result["losses"] == pytest.approx(plain["losses"], rel=1e-9)


def held_by_libraries(kind: str) -> int:
    """Have cuBLAS take its memory, in the threads of the forward and the backward; return the bytes."""
    x = torch.rand(64, 64, device=kind, requires_grad=True)
    nn.functional.linear(x, x, x[0]).sum().backward()
    (x @ x).sum().backward()
    del x
    return int(torch.get_device_module(kind).memory_allocated())


def held(kind: str = "cuda", width: int = WIDTH) -> int:
    """Take three steps; return the bytes that tensors of this rank take on the device between two steps."""
    libraries = held_by_libraries(kind)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers).to(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, width, device=kind)).square().mean()
        loss.backward()
        del loss
        torch.get_device_module(kind).synchronize()  # work in progress holds memory
        kept = int(torch.get_device_module(kind).memory_allocated()) - libraries
        optimizer.step()
    return kept


@pytest.mark.parametrize("zero_lvl", [0, 1, 2, 3])
def test_a_rank_holds_its_share_within_a_tenth(zero_lvl: Any) -> None:
    for found in on_two(held, {}, zero_lvl=zero_lvl, batches="split").per_rank:
        assert found == pytest.approx(share(zero_lvl), rel=0.1)


def share(zero_lvl: int, width: int = WIDTH) -> int:
    """In float32 with Adam: 4 bytes of parameter, 4 of gradient and 8 of state, each halved from its level on."""
    return LAYERS * width * width * sum(((4, 4, 8), (4, 4, 4), (4, 2, 4), (2, 2, 4))[zero_lvl])


def skips(poison: int) -> dict[str, Any]:
    """Train in float16; one step, number ``poison``, has an infinite loss in one row."""
    model = nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.linspace(0, 1, 64, device="cuda").reshape(8, 8)
        x[7, 0] = torch.inf if step == poison else 0.5
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "weights": model.weight.detach().flatten().cpu()}


def test_a_scaler_skips_the_steps_that_one_process_skips() -> None:
    result = on_two(skips, {"poison": 3})
    torch.manual_seed(0)
    plain = skips(3)
    assert result["scales"] == plain["scales"]
    assert plain["scales"] == [256.0, 512.0, 512.0, 256.0, 256.0, 512.0]
    torch.testing.assert_close(result["weights"], plain["weights"], rtol=1e-3, atol=1e-4)
