"""Programs that look which of their processes listen, or attack a run; in a file that a rank imports without pytest."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.doors import listening

NOBODY = 65534


def train(steps: int = 12) -> list[float]:
    """Losses of a small training."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(steps * 8, 4).double(), torch.randn(steps * 8, 1).double())
    losses = []
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def held_open() -> list[int]:
    """This rank's process, those that it was forked from, and the ones that it has started."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [os.getpid(), os.getppid(), *map(int, children)]


def as_a_run() -> Any:
    before = listening(held_open())
    train()
    return before + listening(held_open())


def as_a_distributed_program() -> Any:
    dist.init_process_group()
    total = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    pairs = dist.new_group([0, 1])
    dist.barrier(group=pairs)
    assert total.tolist() == [3.0] * 3
    return listening(held_open())


def as_nobody(host_process: int) -> list[str]:
    """Try, as a process of another user, to reach the ranks of ``host_process``."""
    ranks = Path(f"/proc/{host_process}/task/{host_process}/children").read_text().split()
    pids = [host_process, *map(int, ranks)]
    doors = listening(pids)
    folders = [f for pid in pids for f in _folders(pid)]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writing, json.dumps(_tried(pids, doors, folders)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        told = file.read()
    os.waitpid(child, 0)
    taken: list[str] = json.loads(told)
    return taken


def _folders(pid: int) -> list[str]:
    """Folders of the run, by the files in them that a process has open."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if "/run-" in target:
                found.add(str(Path(target).parent))
    return sorted(found)


def _tried(pids: list[int], doors: list[str], folders: list[str]) -> list[str]:
    assert folders  # the run has one
    taken = [f"a door: {door}" for door in doors]
    paths = [f"{folder}/store" for folder in folders] + folders
    paths += [f"/proc/{pid}/{what}" for pid in pids for what in ("mem", "environ", "fd", "maps")]
    paths += [str(path) for path in Path("/dev/shm").iterdir() if "lagom" in path.name]
    for path in paths:
        with contextlib.suppress(OSError):
            taken.append(f"{path}: {os.listdir(path) if os.path.isdir(path) else _read(path)}")
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            taken.append(f"a signal to {pid}")
    return taken


def _read(path: str) -> int:
    with open(path, "rb") as file:
        return len(file.read(1))
