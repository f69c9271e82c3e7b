"""Programs as people write them for torchrun: a sampler, DDP, metrics reduced by hand, rank 0 prints and saves."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")),
)


def by_variables(folder: str) -> float:
    """The variables are there, or it fails."""
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    assert 0 <= local_rank <= rank < world_size
    dist.init_process_group(backend="gloo")
    loss = train(folder)
    dist.destroy_process_group()
    return loss


def or_alone(folder: str) -> float:
    """Distributed where the variables are there; it leaves the group as it is at the end."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method="env://", world_size=world_size, rank=rank)
        dist.barrier()
    return train(folder)


def spawning(folder: str) -> None:
    """Start ranks itself, on one machine."""
    mp.spawn(spawned, args=(2, folder), nprocs=2, join=True)


def spawned(rank: int, world_size: int, folder: str) -> None:
    """One of the ranks of a program that spawns them."""
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(21000 + os.getppid() % 9000)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train(folder)
    dist.destroy_process_group()


def train(folder: str) -> float:
    """Train a small network, in a group or alone; the loss over all ranks."""
    grouped = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if grouped else 0
    torch.manual_seed(5)
    inputs = torch.randn(48, 3, dtype=torch.float64)
    model: nn.Module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    torch.manual_seed(rank)
    bare = model
    if grouped:
        model = DDP(model)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] | None = DistributedSampler(data, seed=3) if grouped else None
    loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    total = torch.zeros((), dtype=torch.float64)
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        total.zero_()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if grouped:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item()}")
            torch.save(bare.state_dict(), os.path.join(folder, "best.pt"))
    torch.save(bare.state_dict(), os.path.join(folder, f"rank{rank}.pt"))
    return total.item()


if __name__ == "__main__":
    {"torchrun": by_variables, "fallback": or_alone, "spawn": spawning}[sys.argv[1]](sys.argv[2])
