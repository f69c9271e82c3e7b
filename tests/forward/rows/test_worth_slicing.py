"""Whether a split pays: the operations that it saves against everything that ranks exchange for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lagom.forward.rows import whole_batch
from lagom.forward.rows.module_tree import ModuleTree
from lagom.forward.rows.split_candidate import measure_call
from lagom.forward.rows.whole_batch import ForwardWork, is_worth_slicing

WORK: dict[str, Any] = {"rows": 256, "flops": 42e6, "output_bytes": 2048}


@pytest.mark.parametrize(
    ("more", "training", "pays"),
    [
        ({"flops": 84e6}, True, True),
        ({"parameter_bytes": 340_000}, True, False),  # an MLP 64-256-256-2
        ({"flops": 84e6, "parameter_bytes": 340_000}, True, True),
        ({"parameter_bytes": 340_000, "num_batchnorms": 2}, True, False),
        ({"flops": 42e7, "parameter_bytes": 340_000, "num_batchnorms": 2}, True, True),
        ({"input_bytes": 2e6}, True, False),
        ({"input_bytes": 2e6, "flops": 168e6}, False, True),  # without gradients, none of the inputs is gathered
        ({"rows": 8, "flops": 2 * 14e6 * 8, "parameter_bytes": 56_000_000}, True, False),
        ({"rows": 512, "flops": 2 * 14e6 * 512, "parameter_bytes": 56_000_000}, True, True),
    ],
)
def test_exchanges_of_outputs_inputs_gradients_and_statistics_count(
    more: dict[str, Any], training: bool, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_batch, "ALWAYS", False)
    work = ForwardWork(**{**WORK, **more})
    cpu = torch.device("cpu")
    assert is_worth_slicing(work, 2, cpu, training=training, shares_memory=True) == pays


def test_the_first_call_measures_the_work() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2).requires_grad_(False))
    x = torch.randn(10, 4, requires_grad=True)
    candidate = ModuleTree(print).candidate(model, nn.Module.__call__, (x,), {}, torch.device("cpu"))
    _, finding = measure_call(candidate, lambda: model(x))
    assert finding.work == ForwardWork(
        rows=10,
        flops=2.0 * 10 * (4 * 6 + 6 * 2 + 6 + 2 + 12),  # at least two for each parameter and row
        output_bytes=10 * 2 * 4,
        input_bytes=10 * 4 * 4,
        parameter_bytes=4 * (4 * 6 + 6 + 12),
        num_batchnorms=1,
    )
    model.eval()
    assert measure_call(candidate, lambda: model(x))[1].work.num_batchnorms == 0
