"""Trains a program of ``benchmarks.share``, and prints the CPU seconds of this process for each step.

``python -m benchmarks.share_step NAME STEPS``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.share_models import MODELS
from benchmarks.share_programs import PROGRAMS

ALL_PROGRAMS = PROGRAMS | MODELS


def train(
    name: str,
    steps: int,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> list[float]:
    """Train the program ``name``; return the CPU seconds of this process for each step.

    Args:
        wrap: returns what the program calls instead of its model.
        part: returns the part of each tensor of a batch on which it trains.
    """
    torch.manual_seed(0)
    model, data, batch_size, loss_of = ALL_PROGRAMS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    called = wrap(model)
    seconds: list[float] = []
    for whole, _ in zip(_endless(loader), range(steps), strict=False):
        batch = [part(one) for one in whole]
        began = time.process_time()
        optimizer.zero_grad()
        loss_of(called, *batch).backward()
        optimizer.step()
        seconds.append(time.process_time() - began)
    return seconds


def _endless(loader: Any) -> Iterator[Any]:
    for one in repeat(loader):
        yield from one


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]))))
