"""PyTorch's own tests pass on two ranks as in one process, but for those that are listed here."""

from __future__ import annotations

import faulthandler

import pytest

from tests.pytorch_suite import FILES, lost

LOST = {
    "test_autograd": {
        # Hooks of leaves are called after the backward, when the averages are there, and others during it.
        *("test_backward_hook_relative_ordering", "test_current_graph_task_execution_order"),
        # Gradients with a graph come from an AverageFunction, which these find in the graph.
        *("test_inplace_on_view_backward", "test_once_differentiable"),
        # A sparse gradient is the average, coalesced, in memory of its own.
        "test_no_grad_copy_sparse",
    },
    # Trains torch.empty, so memory that no rank has initialised, which is a DivergenceError.
    "test_optim": {"test_no_cyclic_references_in_step"},
}
"""Names of tests that do not pass on ranks, by file."""


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", FILES)
def test_what_passes_in_one_process_passes_on_two_ranks(file: str) -> None:
    faulthandler.cancel_dump_traceback_later()  # which would end the tests after five minutes
    num, missing = lost(file)
    assert num > 20
    assert {name.rpartition(".")[2] for name in missing} == LOST.get(file, set()), missing
