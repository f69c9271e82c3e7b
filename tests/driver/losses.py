"""Runs that are killed from outside at a place that the program has reached, by the process ids in run.json."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PATIENCE_S = 60.0
POINTS = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))


def pause_at(gate: str) -> None:
    """Wait on every rank while the file ``gate`` is there, and tell the test so by a file beside it."""
    if os.path.exists(gate):
        with open(f"{gate}.reached", "w"):
            pass
        while os.path.exists(gate):
            time.sleep(0.005)


def network() -> nn.Module:
    """Two layers, in float64."""
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()


def train(gates: str, epochs: int = 3) -> dict[str, Any]:
    """Train, print each epoch, and wait at the gate of each epoch's second batch; return the weights."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        total = 0.0
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=8, shuffle=True)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            if number == 1:
                pause_at(f"{gates}-{epoch}")
        print(f"epoch {epoch}: {total:.17g}")
    return {name: value.clone() for name, value in model.state_dict().items()} | {"random": torch.rand(3)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all values have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def killed(gates: Sequence[Path], kill: Callable[[], None]) -> Iterator[None]:
    """Call ``kill`` each time that the program has come to the next of ``gates``, and then open the gate."""
    for gate in gates:
        gate.touch()
    failed: list[BaseException] = []
    over = threading.Event()

    def watch() -> None:
        try:
            for gate in gates:
                reached = Path(f"{gate}.reached")
                wait_for(lambda reached=reached: reached.exists() or over.is_set())  # type: ignore[misc]
                assert not over.is_set(), "the run has ended before"
                kill()
                time.sleep(0.1)  # else the other ranks come through the gate before the loss is known
                gate.unlink()
        except BaseException as error:
            failed.append(error)
            for gate in gates:  # so that the run ends
                gate.unlink(missing_ok=True)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for gate in gates:
            gate.unlink(missing_ok=True)
    assert not failed, failed


def kill_rank(rank: int, run_dir: Path) -> Callable[[], None]:
    """Return a function that kills the process of ``rank`` in the one run below ``run_dir``."""

    def kill() -> None:
        os.kill(ranks(run_dir)[str(rank)]["pid"], signal.SIGKILL)

    return kill


def ranks(run_dir: Path) -> dict[str, Any]:
    """Return what run.json says of the ranks of the one run below ``run_dir``; it has all processes."""
    found: dict[str, Any] = {}

    def are_known() -> bool:
        nonlocal found
        found = record(run_dir)["ranks"]
        return bool(found) and all("pid" in one for one in found.values())

    wait_for(are_known)
    return found


def record(run_dir: Path) -> dict[str, Any]:
    """Return run.json of the one run below ``run_dir``."""
    (path,) = run_dir.glob("*/run.json")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def wait_for(true: Callable[[], bool]) -> None:
    """Wait until ``true`` returns so."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
