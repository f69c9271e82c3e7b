"""Programs that record their training elsewhere than in a file of their own; run as a script, it is the driver."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lagom import experiment
from tests.snapshots.training import Network, config, pause


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def take_snapshots_often() -> None:
    """Have as many snapshots as there can be: in a hundredth of a short run there would be one."""
    from lagom.snapshots import snapshot_taker

    snapshot_taker.SHARE = 1.0


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def on_board(train_set: Any, folder: str) -> None:
    """Log for TensorBoard: in a writer that is open all the time, in one of each epoch, and in one that is closed."""
    from torch.utils.tensorboard import SummaryWriter

    take_snapshots_often()
    first = SummaryWriter(f"{folder}/first")
    first.add_text("about", "closed before the training")
    first.close()
    quiet = SummaryWriter(f"{folder}/quiet")  # has no event yet when the run is killed
    model, optimizer = learner()
    with SummaryWriter(f"{folder}/board", flush_secs=3600) as writer:
        for number in range(3):
            inner = SummaryWriter(f"{folder}/epoch{number}")
            for at, (x, y) in enumerate(DataLoader(train_set, batch_size=4, shuffle=True)):
                loss = step(model, optimizer, x, y)
                writer.add_scalar("loss", loss, 10 * number + at)
                writer.add_scalars("both", {"a": at, "b": -at}, 10 * number + at)
                inner.add_histogram("weights", next(model.parameters()), at)
                if number == 1:
                    pause(folder, 0.2 * 1.5**at)
            inner.close()
            if number == 2:
                quiet.add_scalar("loss", loss, number)
        writer.add_hparams({"lr": 0.1}, {"loss": loss}, run_name="best")
    quiet.close()


if __name__ == "__main__":
    function = {"on_board": on_board}[sys.argv[2]]
    experiment.lagom(function, config(Path(sys.argv[1]), world_size=2, snapshot_every_s=0.1))
