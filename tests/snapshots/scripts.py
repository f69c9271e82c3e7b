"""Scripts that tests run by ``lagom run``, in a folder of their own, and the module beside them."""

BESIDE = '''
import os
import time

print("the module beside the script is imported")
num_batches = 0


def train_epoch(model, loader, step, rows, epoch):
    global num_batches
    for number, (x, y) in enumerate(loader):
        loss = step(model(x), y)
        rows.write(f"{epoch},{number},{loss:.17g}\\n")
        num_batches += 1
        if epoch == 1:
            pause(0.3 * 2**number)
    return loss


def pause(seconds):
    """Wait while the test waits for a snapshot, which may take 1% of the time only."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.path.exists("slowly"):
        time.sleep(0.01)
'''

LOOP = '''"""A script whose loop is its own."""
import sys

import beside
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(sys.argv[1]))
num_forwards = 0


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x):
        global num_forwards
        num_forwards += 1
        return self.layers(x)


points = torch.rand(40, 3, dtype=torch.float64)
loader = DataLoader(TensorDataset(points, points.prod(dim=1, keepdim=True)), batch_size=4, shuffle=True)
model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
print("the script begins")
with open("rows.csv", "w") as rows:
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            rows.write(f"{epoch},{number},{loss.item():.17g}\\n")
            if epoch == 1:
                beside.pause(0.3 * 2**number)
        print(f"epoch {epoch}: {loss.item():.12g}, {num_forwards} forwards, {torch.rand(1)}")
print([name for name in globals() if "lagom" in name], Network is type(model), sys.modules["__main__"].model is model)
'''

MAIN = '''"""A script with a function that it calls if it is the program."""
from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field

import torch
from beside import train_epoch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Settings:
    lr: float
    epochs: int = 3
    losses: list[float] = field(default_factory=list)


def main(settings: Settings) -> int:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    points = torch.rand(40, 3, dtype=torch.float64)
    loader = DataLoader(TensorDataset(points, points.prod(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    best = float("inf")

    def step(output, target):
        nonlocal best
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(output, target)
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
        return loss.item()

    rows = open("rows.csv", "a")
    for epoch in range(settings.epochs):
        settings.losses.append(train_epoch(model, loader, step, rows, epoch))
        print(f"epoch {epoch}: {settings.losses[-1]:.12g}, best {best:.12g}")
    rows.close()
    print(sorted(asdict(settings)), isinstance(settings, Settings), sys.modules["beside"].num_batches)
    return 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    sys.exit(main(Settings(parser.parse_args().lr)))
'''
