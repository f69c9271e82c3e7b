"""A transformer with dropout over padded sentences, put together by the loader's collate_fn."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(15, 8, padding_idx=0)
        self.places = nn.Parameter(torch.randn(10, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 2)

    def forward(self, tokens: Tensor, padding: Tensor) -> Any:
        hidden = self.words(tokens) + self.places[: tokens.size(1)]
        hidden = self.encoder(hidden, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(2)
        return self.out((hidden * kept).sum(1) / kept.sum(1))


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([sentence for sentence, _ in samples], batch_first=True)
    return {"tokens": tokens, "padding": tokens == 0, "labels": torch.tensor([label for _, label in samples])}


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    lengths = torch.randint(2, 9, (34,)).tolist()
    sentences = [torch.randint(1, 15, (length,)) for length in lengths]
    data: Any = [(sentence, int(sentence[0] > 7)) for sentence in sentences]
    train_loader = DataLoader(data[:26], batch_size=6, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(data[26:], batch_size=3, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correct = 0
    for epoch in range(epochs):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["tokens"], padding=batch["padding"]), batch["labels"])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        model.eval()
        total, correct = 0.0, 0
        with torch.no_grad():
            for batch in test_loader:
                scores = model(batch["tokens"], batch["padding"])
                total += F.cross_entropy(scores, batch["labels"], reduction="sum").item()
                correct += int((scores.argmax(1) == batch["labels"]).sum())
        print(f"epoch {epoch}: train {loss.item():.10f}, test {total / 8:.10f}, {correct} of 8")
    return {"weights": model.state_dict(), "correct": correct}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
