"""Sentences of different lengths: the mean loss is over the tokens that are not to be ignored."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def criterion(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6, padding_idx=0)
        self.rnn = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Any:
        return self.out(self.rnn(self.words(tokens))[0])


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(1, 12, (33, 6))
    labels = tokens % 3
    outside = torch.arange(6) >= torch.randint(1, 7, (33, 1))
    tokens[outside], labels[outside] = 0, -100
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=7, shuffle=True)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        final = criterion(model(tokens), labels).item()
    print(f"final {final:.10f}")
    return {"weights": model.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
