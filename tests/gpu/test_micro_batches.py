"""``micro_batches`` on a CUDA device, whose memory is limited for it. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lagom import experiment
from lagom.config import TorchDistributedConfig

pytestmark = pytest.mark.gpu

MB = 1 << 20
LAYERS, ROWS, WIDTH = 16, 4096, 2048
"""Each activation takes 32 MB."""


def train(room: int | None, kind: str = "cuda", rows: int = ROWS, width: int = WIDTH) -> dict[str, Any]:
    """A program that knows of no lack of memory; ``room`` are bytes beyond what is held before."""
    torch.manual_seed(0)
    device, module = torch.device(kind), torch.get_device_module(kind)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))]
    model = nn.Sequential(*layers, nn.Dropout(0.1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(rows, 8, device=device)
    model(x[:2]).sum().backward()  # what libraries allocate once
    optimizer.zero_grad()
    module.empty_cache()
    total = module.get_device_properties(device).total_memory
    if room is not None:
        module.set_per_process_memory_fraction((module.memory_reserved() + room) / total)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    finally:
        module.set_per_process_memory_fraction(1.0)
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    return {"weights": weights, "draw": torch.rand((), device=device).item()}


def run(room: int | None, options: dict[str, Any], **fields: Any) -> Any:
    hparams = {"room": room, **options}
    return experiment.lagom(train, TorchDistributedConfig(world_size=1, launcher="inline", hparams=hparams, **fields))


def test_a_program_that_runs_out_of_memory_fits_in_parts() -> None:
    check_parts_fit(300 * MB)


def check_parts_fit(room: int, **options: Any) -> None:
    """Dropout on a GPU draws by its own kernels, for the whole batch in every part."""
    wanted = run(None, options)
    with pytest.raises(torch.OutOfMemoryError, match="micro_batches=2"):
        run(room, options)
    found = run(room, options, micro_batches=16)
    torch.testing.assert_close(found["weights"], wanted["weights"], rtol=1e-4, atol=1e-6)
    assert found["draw"] == wanted["draw"]


@pytest.mark.parametrize("asked", ["bf16", False])
def test_so_many_parts_give_the_gradients_of_one(asked: Any) -> None:
    check_parts_give_gradients_of_one(asked)


def check_parts_give_gradients_of_one(asked: Any, **options: Any) -> None:
    wanted = run(None, options, mixed_precision=asked)
    found = run(None, options, mixed_precision=asked, micro_batches=4)
    limit = 1e-2 if asked else 1e-4
    torch.testing.assert_close(found["weights"], wanted["weights"], rtol=limit, atol=limit)
