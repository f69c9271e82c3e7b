"""A detector: lists of images and of dicts go in; a dict of losses in training, a list of dicts else, comes out."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

Target = dict[str, Tensor]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.box = nn.Linear(4, 2)
        self.score = nn.Linear(4, 1)

    def forward(self, images: list[Tensor], targets: list[Target] | None = None) -> Any:
        features = [torch.relu(self.body(image.unsqueeze(0))).mean((2, 3)).squeeze(0) for image in images]
        if self.training:
            assert targets is not None
            boxes = [
                F.l1_loss(self.box(f).expand(len(t["boxes"]), 2), t["boxes"])
                for f, t in zip(features, targets, strict=True)
            ]
            scores = torch.cat([self.score(f) for f in features])
            wanted = torch.tensor([float(len(t["boxes"]) > 1) for t in targets])
            return {"boxes": torch.stack(boxes).mean(), "scores": F.binary_cross_entropy_with_logits(scores, wanted)}
        return [{"box": self.box(f), "score": self.score(f).sigmoid()} for f in features]


def collate(samples: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    sizes = torch.randint(4, 8, (30, 2)).tolist()
    counts = torch.randint(1, 4, (30,)).tolist()
    data: Any = [(torch.randn(1, *size), {"boxes": torch.rand(n, 2)}) for size, n in zip(sizes, counts, strict=True)]
    loader = DataLoader(data[:22], batch_size=6, shuffle=True, collate_fn=collate)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        model.train()
        for images, targets in loader:
            losses = model(images, targets)
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
        model.eval()
        found = []
        with torch.no_grad():
            for images, _ in DataLoader(data[22:], batch_size=3, collate_fn=collate):
                found += [output["score"].item() for output in model(images)]
        print(f"epoch {epoch}: " + " ".join(f"{score:.8f}" for score in found))
    return {"weights": model.state_dict(), "scores": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
