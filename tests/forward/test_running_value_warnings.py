"""``lagom.forward.running_value_warnings`` and BatchNorm of parts: normalisations that see a share are told of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import run_ranks


class Frozen(nn.Module):
    """Running values as frozen parameters in a container, as in Keras' layers."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterDict({"mean": nn.Parameter(torch.zeros(4), requires_grad=False)})

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        with torch.no_grad():
            self.values["mean"].mul_(0.9).add_(0.1 * mean)
        return x - mean


class Buffered(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Ghost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in x.split(4)])


class Named(nn.BatchNorm1d):
    """A layer of the program with torch's running statistics, which follow the whole batch."""


LAYERS: dict[str, tuple[Any, list[str]]] = {
    "frozen": (Frozen, ["changes its"]),
    "buffered": (Buffered, ["changes its"]),
    "ghost": (Ghost, ["ghost batch norm"]),
    "torch's": (lambda: nn.BatchNorm1d(4), []),
    "named": (lambda: Named(4), []),
    "spectral": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), []),
}


def test_what_a_forward_keeps_of_a_share_is_told_of() -> None:
    def program(session: Session) -> dict[str, list[str]]:
        found = {}
        for name, (make, _wanted) in LAYERS.items():
            session.said.clear()
            model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 1))
            for (x,) in DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=16):
                model(x).square().mean().backward()
            said = " ".join(session.said)
            found[name] = [text for text in ("changes its", "ghost batch norm") if text in said]
        return found

    wanted = {name: told for name, (_, told) in LAYERS.items()}
    assert run_ranks(2, program) == [wanted] * 2
    assert run_ranks(2, program, batches="whole") == [{name: [] for name in LAYERS}] * 2


def test_modules_that_come_after_others_are_examined_too() -> None:
    def program(session: Session) -> list[bool]:
        told = []
        for (x,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=8):
            for _ in range(3):
                modules = [nn.Sequential(nn.Linear(4, 4), Buffered()) for _ in range(20)]
                for module in modules:
                    session.said.clear()
                    module(x)
                    module(x).mean().backward()
                    told.append(any("changes its" in text for text in session.said))
                del module, modules  # so that the next modules are at the same addresses
        return told

    assert run_ranks(2, program) == [[True] * 60] * 2
