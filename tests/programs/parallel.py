"""Distributed already: DistributedDataParallel and its sampler, metrics all-reduced, files and prints by rank 0."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    x = torch.randn(36, 3)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    total = torch.zeros(2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total.zero_()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(inputs), float(len(inputs))])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total[0].item() / total[1].item():.10f} over {int(total[1])} samples")
            torch.save(model.module.state_dict(), "model.pt")
        dist.barrier()
    state = torch.load("model.pt", weights_only=True)
    dist.destroy_process_group()
    return {"weights": model.module.state_dict(), "saved": state["0.weight"], "world": world_size, "total": total}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    result = train(args.epochs)
    torch.save(result["weights"], "result.pt")
