"""Two modules share a parameter, a third is built from the parts of another; one of them is frozen halfway."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, words.num_embeddings, bias=False)
        self.out.weight = words.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.out(torch.tanh(self.mix(self.words(tokens).mean(1))))


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(0, 9, (40, 5))
    loader = DataLoader(TensorDataset(tokens, tokens.mode(1).values), batch_size=7, shuffle=True, drop_last=True)
    words = nn.Embedding(9, 6)
    model = Tagger(words)
    scorer = nn.Sequential(words, model.mix, nn.Tanh(), nn.Linear(6, 1))
    groups: list[Any] = [{"params": model.parameters()}, {"params": scorer[3].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.2)
    for epoch in range(epochs):
        if epoch == 1:
            model.mix.requires_grad_(False)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets) + scorer(inputs).square().mean()
            loss.backward()
            optimizer.step()
    assert model.out.weight is words.weight
    model.eval()
    with torch.no_grad():
        hits = int((model(tokens).argmax(1) == tokens.mode(1).values).sum())
    print(f"{hits} of {len(tokens)}")
    return {"tagger": model.state_dict(), "scorer": scorer.state_dict(), "hits": hits}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
