"""Programs that integration tests run on ranks, and functions to run them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lagom
from lagom.config import TorchDistributedConfig
from lagom.on_rank.resource_usage import children
from lagom.result import Result

POINTS = 101  # in batches of 4: the last has one sample, fewer than there are ranks


def run(function: Any, world_size: int | None = None, **config: Any) -> Result:
    """``function`` through lagom on the active session; a loss ends it unless ``max_failures`` says otherwise."""
    from lagom import experiment  # not in each rank, which finds its function here: 0.3 s of processor time

    settings = {"max_failures": 0, **config}
    return experiment.lagom(function, TorchDistributedConfig(world_size=world_size, launcher="spark", **settings))


def place() -> tuple[int, int]:
    """Return this rank's place."""
    return lagom.rank(), lagom.world_size()


def nothing() -> None:
    """A run without content."""


def points() -> TensorDataset:
    """Samples of a scalar field, in float64."""
    inputs = torch.rand(POINTS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, 1].sin() + inputs[:, 0].cos()).unsqueeze(1))


class Net(torch.nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Values at ``inputs``."""
        values: torch.Tensor = self.layers(inputs)
        return values


def train(module: type[torch.nn.Module], train_set: TensorDataset) -> dict[str, Any]:
    """An epoch of SGD; gives the weights."""
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in DataLoader(train_set, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


class LateError(Exception):
    """A user's own exception, with the time of its raising."""

    def __init__(self, what: str, at: float) -> None:
        super().__init__(what, at)
        self.at = at


def raise_while_the_other_sleeps() -> None:
    """Rank 1 fails; the other would not end while a test lasts."""
    if lagom.rank() == 1:
        raise LateError("the disk is full", time.time())
    time.sleep(1000)


def raise_while_the_other_reduces(module: type[torch.nn.Module], train_set: TensorDataset) -> None:
    """Rank 1 fails in its third batch; the other waits for its gradients."""
    model = module()
    for step, (inputs, targets) in enumerate(DataLoader(train_set, batch_size=4)):
        if step == 3 and lagom.rank() == 1:
            time.sleep(0.2)
            raise LateError("a bad sample", time.time())
        torch.nn.functional.mse_loss(model(inputs), targets).backward()


def fail_with_a_large_error() -> None:
    """An exception that holds a batch."""
    error = ValueError("no")
    error.batch = torch.zeros(10 << 18)  # type: ignore[attr-defined]
    raise error


def be_killed() -> None:
    """Rank 1 is killed; the other sleeps."""
    if lagom.rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def daemon_of(pid: int) -> int:
    """Return the parent of the Python workers of a rank's executor; it is in the command line of their fork server."""
    return int(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[4])


def workers_of_spark() -> list[int]:
    """Return the Python workers of this rank's executor, which Spark keeps for the next call."""
    return sorted(children(daemon_of(os.getpid())))


def be_stuck() -> None:
    """Rank 1 gets nowhere; the other is done."""
    if lagom.rank() == 1:
        time.sleep(1000)


class Stuck(Dataset[torch.Tensor]):
    """Samples of which one never comes, where they are asked to."""

    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stuck and index == 9:  # of rank 1
            time.sleep(1000)
        return torch.ones(2)


def train_until_stuck(kind: str) -> None:
    """Rank 1 gets nowhere, in one of several ways; the other waits for its gradients."""
    model = torch.nn.Linear(2, 1)
    for number, batch in enumerate(
        DataLoader(Stuck(kind == "worker"), batch_size=4, num_workers=int(kind == "worker"))
    ):
        if number == 1 and lagom.rank() == 1:
            if kind == "sleep":
                time.sleep(1000)
            while kind == "loop":
                pass
        model(batch).mean().backward()


def kill_the_holder() -> None:
    """The process that holds rank 1, Spark's own, is killed; the other sleeps."""
    if lagom.rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def leave() -> None:
    """Rank 1 ends its process; the other sleeps."""
    if lagom.rank() == 1:
        sys.exit(3)
    time.sleep(1000)


def return_a_lock() -> Any:
    """Return a lock from rank 1, which cannot be pickled."""
    return {"lock": threading.Lock()} if lagom.rank() == 1 else {"lock": None}


def sleep_in(folder: str) -> None:
    """A long run; each rank leaves its process id in ``folder``."""
    # By another program: what a rank other than 0 writes itself is there when it has ended.
    os.system(f"echo {os.getpid()} > {folder}/{lagom.rank()}")
    time.sleep(1000)


def pids_in(folder: Path, world_size: int) -> list[int]:
    """Process ids of the ranks of ``sleep_in``, once all are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [path.read_text() for path in sorted(folder.iterdir())]
        if len(found) == world_size and all(found):
            return [int(pid) for pid in found]
        time.sleep(0.02)
    raise TimeoutError(f"only {len(list(folder.iterdir()))} of {world_size} ranks have started")


def alive(pid: int) -> bool:
    """Whether the process has not ended."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def same_weights(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two models are the same, to 1e-12."""
    assert found.keys() == wanted.keys()
    return all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-12) for name in wanted)


def plain_weights() -> dict[str, Any]:
    """Return the weights that ``train`` gives in a plain call."""
    torch.manual_seed(0)
    return train(Net, points())


def late(function: Any, seconds: float) -> Any:
    """A Spark task's ``function``, begun later in task 1; travels by value."""

    def run(batches: Any) -> Any:
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.partitionId() == 1:
            time.sleep(seconds)
        return function(batches)

    return run
