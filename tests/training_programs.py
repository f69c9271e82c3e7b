"""Ordinary loops and their data; in a file that a rank imports without pytest."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

POINTS = torch.rand(53, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))


def network() -> torch.nn.Sequential:
    """Two layers, in float64."""
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def with_scheduler_groups_and_clipping() -> dict[str, Any]:
    """Two parameter groups, one added later, a scheduler per batch and one per epoch, and the norm clipped."""
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loader = DataLoader(DATA, batch_size=8, shuffle=True)
    norms = []
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            cosine.step()
        model.eval()
        with torch.no_grad():
            plateau.step(torch.nn.functional.mse_loss(model(POINTS), DATA.tensors[1]).item())
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"weights": weights(model), "rates": rates, "norms": norms, "steps": len(norms)}


def with_init_applied_after_construction() -> dict[str, Any]:
    """Parameters drawn anew, by ``apply`` and by hand, after model and optimizer exist."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def init(part: torch.nn.Module) -> None:
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.3)

    model.apply(init)
    with torch.no_grad():
        next(model[0].parameters()).copy_(torch.rand(8, 3))
    for inputs, targets in DataLoader(DATA, batch_size=10, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return {"weights": weights(model)}


def metrics() -> dict[str, float]:
    """Four ways to judge a model on a test set, the last of which no mean over shares could give."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in DataLoader(DATA, batch_size=9, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    total, correct, batches, scores, labels = 0.0, 0, 0, [], []
    with torch.no_grad():
        for inputs, targets in DataLoader(DATA, batch_size=10):
            outputs = model(inputs)
            total += torch.nn.functional.mse_loss(outputs, targets, reduction="sum").item()
            correct += int(((outputs > 0.125) == (targets > 0.125)).sum())
            batches += 1
            scores.append(outputs.flatten())
            labels.append((targets > 0.125).flatten())
    score, label = torch.cat(scores), torch.cat(labels)
    above = (score[label].unsqueeze(1) > score[~label].unsqueeze(0)).double()  # Mann and Whitney's form of the AUC
    return {"sum": total, "mean": total / batches, "accuracy": correct / len(DATA), "auc": above.mean().item()}
