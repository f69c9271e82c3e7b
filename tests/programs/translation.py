"""Encoder and decoder, called a token at a time, with teacher forcing decided by random."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.rnn = nn.GRU(6, 6, batch_first=True)

    def forward(self, tokens: Tensor) -> Any:
        return self.rnn(self.words(tokens))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.cell = nn.GRUCell(12, 6)
        self.out = nn.Linear(6, 9)

    def forward(self, token: Tensor, state: Tensor, memory: Tensor) -> Any:
        weights = torch.bmm(memory, state.unsqueeze(2)).squeeze(2).softmax(1)
        context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
        state = self.cell(torch.cat([self.words(token), context], 1), state)
        return self.out(state), state


def train(epochs: int = 2, batch_size: int = 6) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    source = torch.randint(0, 8, (30, 4))
    target = source.flip(1)
    loader = DataLoader(TensorDataset(source, target), batch_size=batch_size, shuffle=True)
    encoder, decoder = Encoder(), Decoder()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.2) for part in (encoder, decoder)]
    for epoch in range(epochs):
        total = 0.0
        for inputs, wanted in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            memory, state = encoder(inputs)
            state, token = state.squeeze(0), torch.full((len(inputs),), 8)
            forced = random.random() < 0.5
            loss = torch.zeros(())
            for i in range(wanted.size(1)):
                scores, state = decoder(token, state, memory)
                loss = loss + F.cross_entropy(scores, wanted[:, i])
                token = wanted[:, i] if forced else scores.argmax(1)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += loss.item() / wanted.size(1)
        print(f"epoch {epoch}: {total / len(loader):.10f}")
    return {"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    random.seed(7)
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
