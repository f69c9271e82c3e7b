"""LBFGS with a closure over all data at once, then a forecast by feeding the model its own outputs; no loader."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTMCell(1, 6)
        self.second = nn.LSTMCell(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor, future: int = 0) -> Any:
        outputs = []
        h1 = c1 = h2 = c2 = torch.zeros(x.size(0), 6)
        output = x[:, :1]
        for i in range(x.size(1) + future):
            h1, c1 = self.first(x[:, i : i + 1] if i < x.size(1) else output, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            output = self.out(h2)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def train(steps: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    start = torch.randint(-20, 20, (10, 1))
    waves = torch.sin((start + torch.arange(13)) / 3.0)
    inputs, targets = waves[3:, :-1], waves[3:, 1:]
    test_inputs, test_targets = waves[:3, :-1], waves[:3, 1:]
    model = Sequence()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    test_loss = 0.0
    for step in range(steps):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            print(f"loss {loss.item():.10f}")
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            prediction = model(test_inputs, future=5)
            test_loss = criterion(prediction[:, :-5], test_targets).item()
        print(f"step {step}: test loss {test_loss:.10f}")
    return {"weights": model.state_dict(), "test loss": test_loss, "forecast": prediction[:, -5:]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.save(train(args.steps), "result.pt")
