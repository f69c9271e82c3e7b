"""``probe``: what a forward gets in place of its batch, and what is said of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lagom.session.session import Session
from tests.ranks import alone, run_ranks


class Looked(nn.Module):
    """Has ids in the first column of a matrix of floats; NaN is no index."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(6, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Any:
        return self.rest(self.table(x[:, 0].long()) * x[:, 1:])


class Coupled(Looked):
    """Mixes rows by a small weight."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found + 1e-3 * found.mean(0)


class Weighted(nn.Module):
    """Computes a loss of probabilities in its forward; NaN is no probability."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Any:
        given = x.abs() / (1 + x.abs())
        return F.binary_cross_entropy(self.body(x).sigmoid().expand(-1, 5), given, reduction="none").mean(1)


class Refusing(nn.Module):
    """Cannot be called with less than a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Any:
        return self.body(x.view(8, 5))


def trained(kind: Callable[[], nn.Module]) -> Callable[[Session], Any]:
    def program(session: Session) -> Any:
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _step in range(3):
            x = torch.cat([torch.randint(0, 6, (8, 1)).double(), torch.randn(8, 4, dtype=torch.float64)], 1)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, sorted(text.partition(": it ")[2] for text in session.said if "runs whole" in text)

    return program


REASONS = {
    Looked: "",
    Weighted: "",
    Coupled: "does not compute the rows of its batch one by one",
    Refusing: "fails on a part of its batch (RuntimeError: shape '[8, 5]' is invalid for input of size 20)",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_forward_that_fails_on_nan_is_examined_by_another_row(kind: type[nn.Module]) -> None:
    wanted, _ = alone(trained(kind))
    for found, said in run_ranks(2, trained(kind), batches="whole", always_slices=True):
        assert found == pytest.approx(wanted, rel=1e-12)
        assert said == [REASONS[kind]] * bool(REASONS[kind])
