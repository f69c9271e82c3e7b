"""Trains a program of ``benchmarks.share``, and prints the CPU seconds of this process for each step.

``python -m benchmarks.share_step NAME STEPS``. With a third argument, ``speed``, lagom's clock of steps counts CPU
seconds of the program's thread, too.
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
from lagom.watch import step_clock

ALL_PROGRAMS = PROGRAMS | MODELS


def train(
    name: str,
    steps: int,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> list[float]:
    """Train the program ``name``; return the CPU seconds of this process for each step, loading included.

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
    began = time.process_time()
    for whole, _ in zip(_endless(loader), range(steps), strict=False):
        batch = [part(one) for one in whole]
        optimizer.zero_grad()
        loss_of(called, *batch).backward()
        optimizer.step()
        ended = time.process_time()
        seconds.append(ended - began)
        began = ended
    return seconds


def _endless(loader: Any) -> Iterator[Any]:
    for one in repeat(loader):
        yield from one


if __name__ == "__main__":
    if sys.argv[3:] == ["speed"]:
        vars(step_clock)["perf_counter"] = time.thread_time
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]))))
