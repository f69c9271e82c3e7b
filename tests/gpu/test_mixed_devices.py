"""Programs that know of no GPU, on one: all that they make on the CPU meets what lagom has moved."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.run_state.mixed_devices import meet_on

pytestmark = pytest.mark.gpu

THERE = torch.device("cuda", 0)


@pytest.fixture
def there() -> Iterator[Tensor]:
    with meet_on(THERE, list, lambda: True):
        yield torch.arange(12.0, device=THERE).reshape(4, 3)


def test_gradients_come_back_to_the_cpu(there: Tensor) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (there * weight).sum()
    assert torch.autograd.grad(loss, weight, retain_graph=True)[0].tolist() == [18, 22, 26]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.device.type == "cpu"
    with torch.no_grad():
        weight -= 0.5 * weight.grad
    assert weight.tolist() == [-8, -10, -12]


def test_what_is_written_on_the_cpu_stays_there(there: Tensor) -> None:
    total, places = torch.zeros(3), torch.tensor([1, 0], device=THERE)
    total += there.sum(dim=0)
    total[places] = there[0, :2]
    assert total.device.type == "cpu"
    assert total.tolist() == [1, 0, 26]
    assert torch.arange(5)[places].tolist() == [1, 0]


def test_arrays_and_texts_are_those_of_the_cpu(there: Tensor) -> None:
    assert there[0].numpy().tolist() == [0, 1, 2]
    assert float(np.mean([there[0, 1], there[0, 2]])) == 1.5
    assert np.asarray(there).shape == (4, 3)
    assert repr(there[0]) == f"{there[0]}" == "tensor([0., 1., 2.])"
    file = io.BytesIO()
    torch.save(there, file)
    file.seek(0)
    assert torch.load(file).device.type == "cpu"


def test_packed_sequences_have_their_lengths_on_the_cpu(there: Tensor) -> None:
    layer, lengths = nn.LSTM(1, 2), torch.tensor([2, 3], device=THERE)
    packed = nn.utils.rnn.pack_padded_sequence(there[:2, :, None], lengths, batch_first=True, enforce_sorted=False)
    found, _ = layer.to(THERE)(packed, (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)))
    padded, sizes = nn.utils.rnn.pad_packed_sequence(found, batch_first=True)
    assert padded.device == THERE
    assert sizes.tolist() == [2, 3]


def test_a_program_is_exported_as_on_the_cpu(there: Tensor) -> None:
    model = nn.Linear(3, 2).to(THERE)
    graph = torch.export.export(model, (torch.ones(4, 3),)).graph
    names = [node.name.removesuffix("_1") for node in graph.nodes]  # up to torch 2.12 the input is "input_1"
    assert names == ["p_weight", "p_bias", "input", "linear", "output"]
    assert model.weight.device == THERE
    assert model(there).device == THERE


def test_weights_that_a_program_computes_are_used_in_place_of_a_module_s(there: Tensor) -> None:
    model, scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))
    weights = {name: one * scale for name, one in model.named_parameters()}
    torch.func.functional_call(model, weights, (there,)).sum().backward()
    assert scale.grad is not None
    assert model.weight.grad is not None
    assert scale.grad.device.type == "cpu"


class Counting(nn.Module):
    """Two layers, with a mask that no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.mask = torch.tensor([1.0] * 7 + [0.0], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x * self.mask)
        return found


def resume(folder: str) -> dict[str, Any]:
    """Load a model and its optimizer before the first batch, as a program that goes on from a checkpoint does."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for (rows,) in DataLoader(TensorDataset(torch.rand(20, 8, dtype=torch.float64)), batch_size=4):
        optimizer.zero_grad()
        model(rows).square().sum().backward()
        optimizer.step()
    devices = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
    return {"weights": model.state_dict(), "devices": sorted(devices)}


def test_a_program_that_loads_its_optimizer_goes_on_with_it_on_the_gpu(tmp_path: Path) -> None:
    config = TorchDistributedConfig(world_size=1, launcher="local", seed=0, hparams={"folder": str(tmp_path)})
    found, plain = experiment.lagom(resume, config), resume("")
    assert found["devices"] == ["cuda"]
    torch.testing.assert_close(found["weights"], plain["weights"], rtol=1e-9, atol=1e-11)


def train(folder: str) -> dict[str, Any]:
    """Train with weights of classes, a running total, and an evaluation of all rows at once by numpy."""
    x = torch.rand(60, 8, dtype=torch.float64)
    y = (x.sum(dim=1) * 3).long() % 3
    model, weights = Counting(), torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, total = [], torch.zeros(1, dtype=torch.float64)
    for _ in range(3):
        for rows, labels in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(rows), labels, weight=weights)
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
            losses.append(loss.detach())
            total += loss.detach()
    model.eval()
    with torch.no_grad():
        scores = model(x)
        accuracy = (scores.argmax(dim=1) == y).double().mean().item()
        found = scores.numpy().argmax(axis=1).tolist()
    torch.save(model.state_dict(), f"{folder}/model.pt")
    return {
        "weights": model.state_dict(),
        "averaged": averaged.state_dict(),
        "losses": np.mean(losses),
        "total": total,
        "accuracy": accuracy,
        "found": found,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_program_that_knows_of_no_gpu_runs_as_it_is(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(["0"] * world_size))
    hparams = {"folder": str(tmp_path)}
    result = experiment.lagom(
        train, TorchDistributedConfig(world_size=world_size, launcher="local", seed=0, hparams=hparams)
    )
    check_as_on_the_cpu(result, tmp_path)


def check_as_on_the_cpu(result: Any, tmp_path: Path) -> None:
    """Compare with the program in this process, without a device."""
    checkpoint = torch.load(tmp_path / "model.pt")
    torch.manual_seed(0)
    plain = train(str(tmp_path))
    for name in ("weights", "averaged"):
        for key, value in plain[name].items():
            torch.testing.assert_close(result[name][key], value, rtol=1e-9, atol=1e-11)
    for key, value in plain["weights"].items():
        torch.testing.assert_close(checkpoint[key], value, rtol=1e-9, atol=1e-11)
    assert result["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    assert result["total"].tolist() == pytest.approx(plain["total"].tolist(), rel=1e-9)
    assert (result["accuracy"], result["found"]) == (plain["accuracy"], plain["found"])
