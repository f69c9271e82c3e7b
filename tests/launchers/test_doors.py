"""A run on this machine opens no door: nothing of it listens, and another user of the machine gets at nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import experiment
from lagom.collectives.native import native
from lagom.config import TorchDistributedConfig
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


@pytest.mark.parametrize("program", [as_a_run, as_a_distributed_program])
@pytest.mark.skipif(native() is None, reason="torch's groups are gloo without the compiled part")
def test_no_process_of_a_run_on_one_machine_listens(program: Any) -> None:
    config = TorchDistributedConfig(launcher="local", world_size=2, batches="whole", seed=0)
    assert experiment.lagom(program, config).per_rank == ([], [])


def test_nor_does_one_without_the_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_NATIVE", "0")

    def looked_at() -> Any:
        before = listening(held_open())
        return before, train(), listening(held_open())

    config = TorchDistributedConfig(launcher="local", world_size=2, batches="split", seed=0)
    for before, losses, after in experiment.lagom(looked_at, config).per_rank:
        assert (before, after) == ([], [])
        assert len(losses) == 12


def test_the_search_for_listeners_finds_them(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0lagom-test-of-doors")
        unix.listen()
        found = listening([os.getpid()])
        assert f"tcp 127.0.0.1:{tcp.getsockname()[1]}" in found
        assert "unix @lagom-test-of-doors" in found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_gets_at_nothing_of_a_run() -> None:
    def attacked() -> Any:
        first = train()
        taken = as_nobody(os.getppid()) if lagom.rank() == 0 else []
        return first, train(), taken

    config = TorchDistributedConfig(launcher="local", world_size=2, batches="whole", seed=0)
    plain = train(), train()
    for rank, (first, second, taken) in enumerate(experiment.lagom(attacked, config).per_rank):
        assert (first, second) == (pytest.approx(plain[0], abs=1e-12), pytest.approx(plain[1], abs=1e-12))
        assert taken == [], f"rank {rank}"


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
