"""Training steps that torch.compile compiles whole, with their backward inside: averaged, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lagom.errors import LagomError
from lagom.session.session import Session
from tests.ranks import check_against_one_process, run_ranks

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
    return loss.detach()


def by_autograd_grad(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    parameters = list(model.parameters())
    loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(0.1 * gradient)
    return loss.detach()


_SOAK = [pytest.param(one, marks=pytest.mark.soak) for one in (by_optimizer, by_hand)]


def train(step: Step, backend: str) -> list[Tensor]:
    """Weights after some compiled steps."""
    warnings.simplefilter("ignore")  # torch.compile warns where it breaks the graph, and of its own modules
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fast: Any = torch.compile(step, backend=backend)
    data = torch.utils.data.TensorDataset(torch.randn(16, 6).double(), torch.randn(16, 1).double())
    for x, y in torch.utils.data.DataLoader(data, batch_size=4):
        fast(model, optimizer, x, y)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("step", [*_SOAK, by_autograd_grad])
@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(one, marks=pytest.mark.soak) for one in ("aot_eager", "inductor"))]
)
def test_a_step_compiled_with_its_backward_gives_the_weights_of_one_process(step: Step, backend: str) -> None:
    check_against_one_process(lambda _: train(step, backend), batches="split")


def test_a_backward_that_a_cuda_graph_records_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: the session says that it has one, and torch that its stream is being recorded."""

    def run(session: Session) -> str:
        loss = nn.Linear(2, 1)(torch.rand(3, 2)).mean()
        session.device = torch.device("cuda")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        try:
            loss.backward()
        except LagomError as error:
            return str(error)
        finally:
            session.device = torch.device("cpu")
        return ""

    assert all("a CUDA graph records this backward" in said for said in run_ranks(2, run))
