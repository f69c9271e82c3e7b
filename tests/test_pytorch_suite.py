"""PyTorch's own tests pass on two ranks as in one process, but for those that are listed here."""

from __future__ import annotations

import pytest

from tests.pytorch_suite import lost

LOST = {
    "test_autograd": {
        # Hooks of leaves are called after the backward, when the averages are there, and others during it.
        "test_backward_hook_relative_ordering",
        # Gradients with a graph come from an AverageFunction, which these find in the graph.
        *("test_inplace_on_view_backward", "test_once_differentiable"),
        # A gradient is the average, in memory of its own.
        "test_no_grad_copy_sparse",
        # Not examined.
        "test_current_graph_task_execution_order",
    },
}
"""Names of tests that do not pass on ranks, by file."""


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "file", ["test_autograd", "nn/test_module_hooks", "nn/test_load_state_dict", "nn/test_parametrization"]
)
def test_what_passes_in_one_process_passes_on_two_ranks(file: str) -> None:
    num, missing = lost(file)
    assert num > 20
    assert {name.rpartition(".")[2] for name in missing} == LOST.get(file, set()), missing
