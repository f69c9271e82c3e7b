"""An LSTM whose hidden state, made for batch_size columns, is carried over from batch to batch of a loader."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 9)

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        outputs, state = self.rnn(self.words(tokens), state)
        return self.out(outputs), state


def train(epochs: int = 2, batch_size: int = 6) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    text = (torch.randint(0, 9, (4 * 5 * batch_size + 1,)).cumsum(0)) % 9
    rows = text[:-1].view(batch_size, 4, 5).transpose(0, 1).reshape(-1, 5)
    wanted = text[1:].view(batch_size, 4, 5).transpose(0, 1).reshape(-1, 5)
    loader = DataLoader(TensorDataset(rows, wanted), batch_size=batch_size)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        state = torch.zeros(1, batch_size, 8), torch.zeros(1, batch_size, 8)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            scores, state = model(inputs, state)
            loss = F.cross_entropy(scores.transpose(1, 2), targets)
            loss.backward()
            optimizer.step()
            state = state[0].detach(), state[1].detach()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.10f}")
    return {"weights": model.state_dict(), "state": state[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
