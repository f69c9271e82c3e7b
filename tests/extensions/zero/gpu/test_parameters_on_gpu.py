"""Parameters that are sharded on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from lagom.extensions.zero.parameters.dispatch import ParameterUses
from lagom.extensions.zero.parameters.shards import ParameterShards
from lagom.run_state.leaves import Leaves
from lagom.run_state.memory_layout import storage_of
from tests.gpu.test_cuda import group_of_one

pytestmark = pytest.mark.gpu


def test_parameters_on_the_gpu_are_let_go_of_and_gathered_by_nccl() -> None:
    """At ``zero_lvl=3`` with one rank: their memory is the device's again while nothing needs it."""
    with group_of_one() as group:
        look_at_weights(ParameterShards(group, Leaves(), lambda: True, print), "cuda")


def look_at_weights(weights: ParameterShards, device: str) -> None:
    parameter = torch.nn.Parameter(torch.randn(512, 512, device=device))
    kept = parameter.detach().clone()
    weights.adopt(parameter)
    weights.free_idle()
    assert storage_of(parameter).nbytes() == 0
    x = torch.randn(8, 512, device=device)
    with ParameterUses(weights):
        found = torch.nn.functional.linear(x, parameter)
        weights.free_idle()
        assert storage_of(parameter).nbytes() == 0
        found.square().mean().backward()  # on the device's thread, where there is one
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.mul_(2)
        weights.free_idle()
        assert torch.equal(parameter.detach(), 2 * kept)
    other = kept.clone().requires_grad_()
    torch.nn.functional.linear(x, other).square().mean().backward()
    assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
