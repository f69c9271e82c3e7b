"""Weights & Biases, offline: a run with config, metrics, a watched model, a table, an artifact and a summary."""

import glob
import json
import os
import pathlib
import struct
import tempfile

import torch
import wandb
from torch.utils.data import DataLoader, TensorDataset
from wandb.proto import wandb_internal_pb2

os.environ["WANDB_SILENT"] = "true"
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

folder = tempfile.mkdtemp()
run = wandb.init(project="points", mode="offline", dir=folder, config={"lr": 0.05, "sizes": (8, 1)})
run.config.update({"epochs": 3})

x = torch.rand(60, 2)
data = TensorDataset(x, x.sum(1, keepdim=True) ** 2)
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=wandb.config.lr)
wandb.watch(model, log="all", log_freq=2)
for epoch in range(wandb.config.epochs):
    total = 0.0
    for inputs, targets in DataLoader(data, batch_size=12, shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(inputs) / len(data)
    wandb.log({"loss": total, "epoch": epoch})
wandb.log({"points": wandb.Table(columns=["x"], data=[[1.0]])})
torch.save(model.state_dict(), "model.pt")
artifact = wandb.Artifact("model", type="model")
artifact.add_file("model.pt")
run.log_artifact(artifact)
run.summary["best"] = total
print(f"best {wandb.run.summary['best']:.12f}, sizes {run.config['sizes']}")
run.finish()
wandb.teardown()  # finish() returns before the process of wandb has written the last records


def records(path):
    """The records of a run's file: blocks of 32 KB, in which a record may begin, go on and end."""
    raw, at, parts = pathlib.Path(path).read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", raw, at + 4)
        parts += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


for path in glob.glob(f"{folder}/wandb/*/*.wandb"):  # one run, one writer; on another rank's disk there is none
    for record in records(path):
        items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        for name, text in sorted(items.items()):
            value = json.loads(text)
            if name.startswith("gradients/") and name.endswith(".values"):
                print(name, len(value), sum(value))
            elif name in ("loss", "epoch", "_step"):
                print(name, f"{value:.12f}")
print(len(glob.glob(f"{folder}/wandb/offline-run-*")), "run")
