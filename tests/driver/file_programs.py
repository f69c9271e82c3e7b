"""Programs that write files, and wait where a test kills them; in a file that a rank imports without pytest."""

from __future__ import annotations

import csv
import json
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

import torch

from tests.driver import losses


class PausingAt:
    """Something that takes long to be saved."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def __reduce__(self) -> Any:
        losses.pause_at(self._gate)
        return str, ()


def from_scratch(gate: str) -> str:
    """Write files of all kinds, in each of three epochs."""
    os.mkdir("out")
    steady = open("steady.log", "a")  # noqa: SIM115
    steady.write("begun\n")
    whole = open("whole.log", "w")  # noqa: SIM115
    handler = logging.FileHandler("handler.log")
    logger = logging.getLogger("own")
    logger.addHandler(handler)
    database = sqlite3.connect("rows.db")
    database.execute("create table rows (epoch int)")
    for epoch in range(3):
        with open("rows.csv", "a", newline="") as file:
            csv.writer(file).writerow([epoch, torch.rand(1).item()])
        steady.write(f"epoch {epoch}\n")
        steady.flush()
        whole.write(f"epoch {epoch}\n")
        logger.warning("epoch %d", epoch)
        database.execute("insert into rows values (?)", [epoch])
        database.commit()
        Path(f"out/{epoch}.txt").write_text(str(epoch))
        with open("state.json", "w") as file:
            json.dump({"epoch": epoch}, file)
            file.flush()
            torch.save(PausingAt(f"{gate}-{epoch}"), f"out/{epoch}.pt")
        with open(f"out/{epoch}.once", "x") as file:
            file.write("x")
    whole.close()
    steady.close()
    logger.removeHandler(handler)
    handler.close()
    found = database.execute("select group_concat(epoch) from rows").fetchone()[0]
    database.close()
    return str(found)


def from_checkpoint(gate: str) -> int:
    """Go on from the program's own checkpoint; return the first epoch."""
    first, weights = 0, torch.zeros(2)
    log = open("steady.log", "a")  # noqa: SIM115
    log.write("begun\n")
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt")
        first, weights = saved["epoch"] + 1, saved["weights"]
    for epoch in range(first, 4):
        weights += epoch
        log.write(f"epoch {epoch}\n")
        with open("rows.csv", "a", newline="") as file:
            csv.writer(file).writerow([epoch, *weights.tolist()])
        if epoch % 2 == 1:
            torch.save({"epoch": epoch, "weights": weights}, "last.pt")
        with open("rows.csv", "a", newline="") as file:
            csv.writer(file).writerow([epoch, "saved"])
        log.flush()
        losses.pause_at(f"{gate}-{epoch}")
    log.close()
    return first


def from_scratch_seeded(gate: str) -> None:
    torch.manual_seed(3)
    from_scratch(gate)


def with_events(gate: str) -> None:
    """Write TensorBoard's events, and go on from a checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    first = 0
    writer = SummaryWriter("events")
    if os.path.exists("last.pt"):
        first = torch.load("last.pt") + 1
    for epoch in range(first, 4):
        writer.add_scalar("loss", epoch, epoch)
        torch.save(epoch, "last.pt")
        writer.add_scalar("after", epoch, epoch)
        losses.pause_at(f"{gate}-{epoch}")
    writer.close()
