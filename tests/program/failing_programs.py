"""Programs that fail; in a file that a rank imports without pytest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return {0: 1}[index + 1]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 2000)
        self.width = width

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x @ torch.eye(self.width))


def wrong_target() -> None:
    model = Net(64)
    for x, y in DataLoader(TensorDataset(torch.rand(64, 64), torch.full((64,), 2000)), batch_size=32):
        functional.cross_entropy(model(x), y).backward()


def wrong_sample() -> None:
    for _ in DataLoader(Broken(), batch_size=32, shuffle=True):
        pass


def wrong_sample_in_a_worker() -> None:
    for _ in DataLoader(Broken(), batch_size=32, num_workers=1):
        pass


def wrong_shape() -> None:
    model = Net(3)
    for (x,) in DataLoader(TensorDataset(torch.rand(64, 64)), batch_size=32):
        model(x)


def no_graph() -> None:
    with torch.no_grad():
        loss = Net(64)(torch.rand(4, 64)).sum()
    loss.backward()


def no_file() -> None:
    try:
        open("missing/weights.txt").close()
    except OSError as error:
        raise RuntimeError("there are no weights") from error


def no_checkpoint() -> None:
    torch.load("missing.pt")
