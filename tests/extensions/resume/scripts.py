"""Scripts that tests run by ``lagom run``, in a folder of their own, and the module beside them."""

BESIDE = '''
import os
import time

from torch import nn

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


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


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
from torch import *
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(len(sys.argv[1]))
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
    for epoch in (0, 1, 2):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            rows.write(f"{epoch},{number},{loss.item():.17g}\\n")
            if epoch == 1:
                beside.pause(0.3 * 2**number)
        print(f"epoch {epoch}: {loss.item():.12g}, {num_forwards} forwards, {torch.rand(1)}")
save(model, "model.pt")
print([name for name in globals() if "lagom" in name], Network is type(model), sys.modules["__main__"].model is model)
'''

MAIN = '''"""A script with a function that it calls if it is the program."""
from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field

import torch
from beside import Halved, train_epoch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Settings:
    lr: float
    epochs: int = 3
    losses: list[float] = field(default_factory=list)


def main(settings: Settings) -> int:
    torch.manual_seed(1)
    model = nn.Sequential(Halved(), nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
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

PARTS = {
    "__init__": """
from . import registry
from .registry import *
from . import kinds

print("a package is imported")
""",
    "registry": """
import functools
from typing import NewType, ParamSpec, TypeVar

Number, P, T = NewType("Number", int), ParamSpec("P"), TypeVar("T")
losses, calls = {}, {}


def register(function):
    losses[function.__name__] = function

    @functools.wraps(function)
    def counted(*args):
        calls[function.__name__] = calls.get(function.__name__, 0) + 1
        return function(*args)

    return counted


@functools.lru_cache
def power(base):
    return base**2


class Noted(type):
    names = []

    def __new__(meta, name, bases, variables):
        Noted.names.append(name)
        return super().__new__(meta, name, bases, variables)


class Base(metaclass=Noted):
    children = []

    def __init_subclass__(cls):
        Base.children.append(cls.__name__)
""",
    "kinds": """
import enum
from typing import NamedTuple

from .registry import Base, register


class Child(Base):
    def describe(self):
        return f"{super().__class__.__name__} of {len(self.children)}"


class Phase(enum.Enum):
    train = 1
    test = 2


class Point(NamedTuple):
    x: int
    y: int = 2


@register
def squares(x, y):
    return ((x - y) ** 2).mean()
""",
}
"""Modules of a package beside a script."""

ODD = '''"""A script with what scripts may have at their top."""
from __future__ import annotations
import contextlib, random, signal, sys
from dataclasses import dataclass, field, fields
from math import *
from torch import *
from torch import nn, optim
import __main__, torch, xml.etree.ElementTree
from parts import *
from parts.kinds import Child, Phase, Point, squares
import parts.registry
from torch.utils.data import DataLoader, TensorDataset

random.seed(4), torch.manual_seed(4), torch.set_printoptions(precision=3)
with open(__file__) as file:
    found = [file.readline()]
batch_size, lr = 3, 0.1
settings = {name: value for name, value in globals().items() if type(value).__name__ in ("float", "int")}


@dataclass
class Log:
    rows: list[str] = field(default_factory=list)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.rows.append(f"left {error[0]}")
        return True


def note(number, frame):
    global signals
    signals += 1


def make(width):
    layers = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)]

    def build():
        return nn.Sequential(*layers).double()

    build.width = width
    return build


signals, number = 0, 0
signal.signal(signal.SIGUSR2, note)
points = rand(10, 2, dtype=float64)
loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size, shuffle=True)
model = make(4)()
optimizer = optim.SGD(model.parameters(), lr)
log, callbacks = Log(), [lambda x, scale=scale: x * scale for scale in (0, 1, 2)]


def closing():
    try:
        yield "left by an exception"
    finally:
        found.append("closed")


def leave():
    try:
        for one in closing():
            raise KeyError(one)
    except KeyError:
        found.append("left")


with contextlib.suppress(KeyError):
    for index in closing():
        raise KeyError
found.append("left")
leave()
while number < 2:
    with log, contextlib.suppress(KeyError):
        for phase in list(Phase):
            try:
                for index, (x, y) in enumerate(loader):
                    if phase is Phase.test and index == 2:
                        break
                    loss = squares(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    found.append((phase.name, loss.item(), random.random(), [one(index) for one in callbacks]))
                else:
                    found.append("all")
                for index in closing():
                    raise KeyError
            except KeyError:
                found.append("left")
            finally:
                number += phase is Phase.test
        signal.raise_signal(signal.SIGUSR2)
        raise ValueError(number)
else:
    found.append([y.sum().item() for _, y in loader])
found += [str(points[0]), log, [one.name for one in fields(Log)], settings, signals, Child().describe(), Point(1)]
found += [registry.calls, list(registry.losses), registry.Noted.names, Base.children, power(3), make.__module__]
found += [Child is parts.kinds.Child, __main__.log is log, registry is parts.registry, sys.modules["parts"] is parts]
found += [xml.etree.ElementTree.__name__, sorted(name for name in globals() if "lagom" in name), Number(1), file.closed]
'''

REFUSED = """
import contextlib, functools, sqlite3
import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2)


@contextlib.contextmanager
def section():
    yield


@functools.lru_cache
def filled(n):
    return n


def forever():
    while True:
        yield from loader


with section():
    for _ in loader:
        pass
filled(1)
for _ in loader:
    pass
filled.cache_clear()
connection = sqlite3.connect(":memory:")
for _ in loader:
    pass
del connection
for _ in forever():
    break
try:
    raise KeyError
except KeyError:
    for _ in loader:
        pass


class Body:
    for _ in loader:
        pass
"""
