"""Sentences of different lengths as packed sequences, straight into a recurrent layer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

Batch = tuple[nn.utils.rnn.PackedSequence, Tensor]


def collate(samples: list[tuple[Tensor, float]]) -> Batch:
    packed = nn.utils.rnn.pack_sequence([x for x, _ in samples], enforce_sorted=False)
    return packed, torch.tensor([[y] for _, y in samples])


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    lengths = torch.randint(1, 7, (32,)).tolist()
    sequences = [torch.randn(length, 2) for length in lengths]
    data: Any = [(sequence, sequence.sum().sin().item()) for sequence in sequences]
    rnn, out = nn.GRU(2, 6), nn.Linear(6, 1)
    optimizer = torch.optim.SGD([*rnn.parameters(), *out.parameters()], lr=0.2)
    loader = DataLoader(data, batch_size=6, shuffle=True, collate_fn=collate)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            _, last = rnn(inputs)
            F.mse_loss(out(last.squeeze(0)), targets).backward()
            optimizer.step()
    with torch.no_grad():
        losses = [F.mse_loss(out(rnn(inputs)[1].squeeze(0)), targets).item() for inputs, targets in loader]
    print(f"{len(losses)} batches, mean of the losses {sum(losses) / len(losses):.10f}")
    return {"rnn": rnn.state_dict(), "out": out.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
