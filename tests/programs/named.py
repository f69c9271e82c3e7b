"""A forward that gets tensors along with a list of names, one for each row."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)
        self.offsets = nn.ParameterDict({name: nn.Parameter(torch.randn(1)) for name in ("ada", "bob", "eve")})

    def forward(self, x: Tensor, names: list[str]) -> Any:
        return self.out(x) + torch.stack([self.offsets[name] for name, _ in zip(names, x, strict=False)])


def collate(samples: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    return torch.stack([x for x, _ in samples]), [name for _, name in samples]


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(32, 3)
    data: Any = [(one, ("ada", "bob", "eve")[i % 3]) for i, one in enumerate(x)]
    loader = DataLoader(data, batch_size=6, shuffle=True, collate_fn=collate)
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for inputs, names in loader:
            targets = inputs.sum(1, keepdim=True) + torch.tensor([[float(name == "eve")] for name in names])
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs, names), targets)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
