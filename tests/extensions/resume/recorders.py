"""Programs that record their training elsewhere than in a file of their own; run as a script, it is the driver."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lagom import experiment
from tests.extensions.resume.training import Network, config, pause


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def dwell(folder: str, number: int, at: int) -> None:
    """Have as many snapshots as there can be, until the test has seen one of the second epoch; go on, and wait.

    A rank other than 0 does not see what rank 0 has put into the run's folder.
    """
    from lagom.extensions.resume import snapshot_pace

    snapshot_pace.SHARE = 1.0 if (number, at) < (1, 4) else 1e-9
    if number != 1 or not os.path.exists(f"{folder}/slowly"):
        return
    end = time.monotonic() + 0.5 * 4**at
    while at < 4 and not os.path.exists(f"{folder}/seen") and time.monotonic() < end:
        time.sleep(0.01)
    if at == 8:
        Path(f"{folder}/late").touch()
        pause(folder, 60)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def on_board(train_set: Any, folder: str) -> None:
    """Log for TensorBoard: in a writer that is open all the time, in one of each epoch, and in one that is closed."""
    from torch.utils.tensorboard import SummaryWriter

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
                dwell(folder, number, at)
            inner.close()
            if number == 2:
                quiet.add_scalar("loss", loss, number)
        writer.add_hparams({"lr": 0.1}, {"loss": loss}, run_name="best")
    quiet.close()


def to_mlflow(train_set: Any, folder: str, store: str) -> tuple[list[str], list[float]]:
    """Log each batch to a run, and once to a run below it; return the ids of both, and the losses."""
    import mlflow

    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("bridges")
    client = mlflow.MlflowClient()
    model, optimizer = learner()
    with mlflow.start_run(run_name="outer", tags={"kind": "test"}) as run:
        mlflow.log_params({"lr": 0.1, "depth": 3})
        ids, losses = [run.info.run_id], []
        for number in range(3):
            for at, (x, y) in enumerate(DataLoader(train_set, batch_size=4, shuffle=True)):
                losses.append(step(model, optimizer, x, y))
                mlflow.log_metric("loss", losses[-1], step=10 * number + at)
                client.log_metric(run.info.run_id, "place", at, step=at)
                if number == 1 and at == 6:
                    with mlflow.start_run(run_name="inner", nested=True) as inner:
                        mlflow.log_metrics({"a": at, "b": float("nan")}, step=7, synchronous=False)
                        mlflow.log_dict({"at": at}, "at.json")
                    ids.append(inner.info.run_id)
                    mlflow.log_param("late", at)
                dwell(folder, number, at)
            Path(f"{folder}/note.txt").write_text(f"epoch {number}")
            mlflow.log_artifact(f"{folder}/note.txt", "notes")
            mlflow.set_tag("epoch", number)
    return ids, losses


if __name__ == "__main__":
    folder, name, *store = sys.argv[1:]
    functions: dict[str, Any] = {"on_board": on_board, "to_mlflow": to_mlflow}
    hparams = {"folder": folder} | ({"store": store[0]} if store else {})
    experiment.lagom(functions[name], config(Path(folder), world_size=2, snapshot_every_s=0.1, hparams=hparams))
