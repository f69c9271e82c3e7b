"""``lagom.exchange.staged_transport``, on the CPU; tests/gpu has it on a GPU that two ranks share."""

from __future__ import annotations

from typing import Any

import torch

from lagom.exchange.staged_transport import StagedTransport
from lagom.exchange.torch_transport import TorchTransport
from lagom.exchange.transport import Transport
from lagom.session.session import Session
from tests.ranks import gloo_of, run_ranks


def test_every_exchange_takes_the_way_of_tensors_on_the_cpu() -> None:
    first, second = run_ranks(2, _exchanges)
    assert first == {
        "sum": [3.0, 3.0],
        "broadcast": [1.0, 1.0],
        "gathered": [0.0, 1.0],
        "scattered": [0.0, 2.0],
        "rows": [[0.0], [10.0]],
        "asked": [
            ("all_reduce", "cpu", "sum"),
            ("broadcast", "cpu", ""),
            ("all_gather", "cpu", ""),
            ("reduce_scatter", "cpu", "sum"),
            ("all_to_all_rows", "cpu", ""),
        ],
    }
    assert second == first | {"scattered": [4.0, 6.0], "rows": [[1.0], [11.0]]}


def _exchanges(session: Session) -> dict[str, Any]:
    below, asked = TorchTransport(gloo_of(session)), []

    def choose(operation: str, tensor: torch.Tensor, reduction: str) -> Transport:
        asked.append((operation, tensor.device.type, reduction))
        return below

    rank, staged = session.rank, StagedTransport(choose)
    total, value = torch.full((2,), rank + 1.0), torch.full((2,), float(rank))
    gathered, scattered, rows = torch.empty(2), torch.empty(2), torch.empty(2, 1)
    staged.all_reduce(total).wait()
    staged.broadcast(value, 1).wait()
    staged.all_gather(gathered, torch.tensor([float(rank)])).wait()
    staged.reduce_scatter(scattered, torch.arange(4.0)).wait()
    staged.all_to_all_rows(rows, torch.tensor([[10.0 * rank], [10.0 * rank + 1]])).wait()
    return {
        "sum": total.tolist(),
        "broadcast": value.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "rows": rows.tolist(),
        "asked": asked,
    }
