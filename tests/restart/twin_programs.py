"""Programs that tests kill while their ranks have twins; in a file that a rank imports without pytest."""

from __future__ import annotations

import errno
import faulthandler
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lagom.restart import twin_pace

POINTS = torch.rand(96, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))
PAUSE_S = 0.2
"""Time of a step while the test waits for twins, which are tried after 1, 2 and 6 s at the earliest."""
GATE = "LAGOM_TEST_GATE"
"""Variable with the path of a file that is there for as long."""


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    pause()
    return loss.item()


def pause() -> None:
    """Take time while the test waits for twins."""
    if os.path.exists(os.environ.get(GATE, "")):
        time.sleep(PAUSE_S)


def evaluates(folder: str) -> dict[str, Any]:
    """Train and evaluate in turns, draw random numbers of all kinds, and append to files."""
    model, optimizer = learner()
    seen, held = [], open(f"{folder}/held.txt", "w")  # noqa: SIM115  (open all the time)
    open(f"{folder}/rows.csv", "a").close()  # a new file in the middle of a pass would end the twins
    for epoch in range(6):
        model.train()
        losses = [step(model, optimizer, x, y) for x, y in DataLoader(DATA, batch_size=8, shuffle=True)]
        model.eval()
        with torch.no_grad():
            total = sum(float(nn.functional.l1_loss(model(x), y)) for x, y in DataLoader(DATA, batch_size=16))
        seen.append([*losses, total, random.random(), float(np.random.rand())])
        held.write(f"{epoch} {seen[-1]}\n")
        with open(f"{folder}/rows.csv", "a") as rows:
            rows.write(f"{epoch},{total}\n")
        print(f"epoch {epoch}: {seen[-1]}")
    held.close()
    return {"seen": seen, **model.state_dict()}


def evaluates_by_rows(folder: str) -> dict[str, Any]:
    """Do so with a model whose rows ranks share out, however small it is."""
    from lagom.row_split import whole_batch

    whole_batch.ALWAYS = True
    return evaluates(folder)


def accumulates(folder: str) -> dict[str, Any]:
    """Collect the gradients of four batches for each step, below a progress bar; and have a thread of pyarrow's."""
    import pyarrow as pa
    from tqdm import tqdm  # type: ignore[import-untyped]

    table = pa.array(range(1000), memory_pool=pa.jemalloc_memory_pool())
    assert "jemalloc_bg_thd" in [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    model, optimizer = learner()
    seen = []
    for epoch in range(6):
        table = pa.concat_arrays([table, table[:1000]], memory_pool=pa.jemalloc_memory_pool())
        for number, (x, y) in enumerate(tqdm(DataLoader(DATA, batch_size=8, shuffle=True), mininterval=1e9)):
            loss = nn.functional.mse_loss(model(x), y) / 4
            loss.backward()
            seen.append(loss.item())
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            pause()
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


class Stream(IterableDataset[torch.Tensor]):
    """A stream with a state of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        for _ in range(600):
            yield torch.rand(4, dtype=torch.float64, generator=generator)


def streams(folder: str) -> dict[str, Any]:
    """Read a stream to its end, write events for TensorBoard, and now and then compute in several threads."""
    from torch.utils.tensorboard import SummaryWriter

    torch.set_num_threads(2)
    model, optimizer = learner()
    writer, seen = SummaryWriter(folder), []
    for number, rows in enumerate(DataLoader(Stream(), batch_size=8)):
        seen.append(step(model, optimizer, rows[:, :3], rows[:, 3:]))
        writer.add_scalar("loss", seen[-1], number)
        if number % 15 == 0:
            print(number, seen[-1], torch.rand(200_000).exp().sum().item())
    writer.close()
    return {"seen": seen, **model.state_dict()}


class Drawn(TensorDataset):
    """Points to which workers add numbers that they draw."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = (tensor[index] for tensor in self.tensors)
        return x + torch.rand(3) + random.random(), y


def with_workers(folder: str) -> dict[str, Any]:
    """Load by workers: twins are forked between passes."""
    model, optimizer = learner()
    seen = []
    for epoch in range(6):
        loader = DataLoader(Drawn(*DATA.tensors), batch_size=8, shuffle=True, num_workers=1)
        seen.append([step(model, optimizer, x, y) for x, y in loader])
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


def has_long_passes(folder: str) -> dict[str, Any]:
    """Load by workers that end in the middle of a pass of other ones."""
    model, optimizer = learner()
    seen = []
    for epoch in range(5):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1)):
            seen.append(step(model, optimizer, x, y))
            if number == 0:
                seen.append(float(sum(x.sum() for x, _ in DataLoader(DATA, batch_size=48, num_workers=1))))
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


def saves(folder: str) -> dict[str, Any]:
    """Save a file now and then, and read what the last epoch has saved in the middle of the next one."""
    model, optimizer = learner()
    seen = []
    for epoch in range(6):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=8, shuffle=True)):
            seen.append(step(model, optimizer, x, y))
            if epoch and number == 6:
                seen.append(float(torch.load(f"{folder}/state.pt")["0.bias"].sum()))
        torch.save(model.state_dict(), f"{folder}/state.pt")
        os.makedirs(f"{folder}/epoch-{epoch}")
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


def sets_times(folder: str) -> dict[str, Any]:
    """Set a file's time in each pass, and read it in the next one."""
    model, optimizer = learner()
    seen: list[float] = []
    path = f"{folder}/stamp"
    open(path, "w").close()
    os.utime(path, (0, 0))
    for _ in range(8):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            step(model, optimizer, x, y)
        seen.append(os.stat(path).st_mtime)
        os.utime(path, (0, seen[-1] + 1))
    return {"seen": seen, **model.state_dict()}


def keeps_a_thread(folder: str) -> dict[str, Any]:
    """Train beside a thread of the program's."""
    thread = threading.Thread(target=time.sleep, args=(600,), name="watcher", daemon=True)
    thread.start()
    model, optimizer = learner()
    for _ in range(30):
        for x, y in DataLoader(DATA, batch_size=48):
            step(model, optimizer, x, y)
    return {}


def changes_a_kept_batch(folder: str) -> dict[str, Any]:
    """Change in each step a batch that a worker has loaded, which lies in memory that it has shared."""
    twin_pace.SHARE = 0.3
    model, optimizer = learner()
    kept = next(iter(DataLoader(TensorDataset(torch.zeros(16, 1 << 12)), batch_size=16, num_workers=1)))[0]
    seen = []
    for epoch in range(10):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            kept += 1
            step(model, optimizer, x, y)
        seen.append((epoch, kept[0, 0].item(), kept[-1, -1].item(), kept.double().mean().item()))
    return {"seen": seen, **model.state_dict()}


def cannot_fork_twice(folder: str) -> dict[str, Any]:
    """Train where a process that was forked can fork no further one."""
    twin_pace.SHARE = 0.5  # else the next one is tried a hundred times as long after the first one as that took
    fork, own = os.fork, os.getpid()

    def refuse() -> int:
        if os.getpid() != own:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    os.fork = refuse
    model, optimizer = learner()
    for _ in range(30):
        for x, y in DataLoader(DATA, batch_size=48):
            step(model, optimizer, x, y)
    return {}


def cannot_fork_at_first(folder: str) -> dict[str, Any]:
    """Train where the process between a rank and its first twin can fork no further one."""
    twin_pace.SHARE = 0.5
    fork, own, count = os.fork, os.getpid(), [0]

    def refuse_once() -> int:
        count[0] += os.getpid() == own
        if os.getpid() != own and count[0] == 1:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    os.fork = refuse_once
    model, optimizer = learner()
    for _ in range(10):
        for x, y in DataLoader(DATA, batch_size=8):
            step(model, optimizer, x, y)
    return model.state_dict()


def ends_slowly(folder: str) -> dict[str, Any]:
    """Train where each process takes a while to end, so also the one between a rank and its twin."""
    end = os._exit

    def end_slowly(status: int) -> NoReturn:
        time.sleep(0.5)
        end(status)

    os._exit = end_slowly
    model, optimizer = learner()
    for _ in range(30):
        for x, y in DataLoader(DATA, batch_size=48):
            step(model, optimizer, x, y)
    return {}


class Counted(TensorDataset):
    """Points that workers count in memory that they share with the program."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.count = torch.zeros(1, dtype=torch.long).share_memory_()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.count += 1
        return tuple(tensor[index] for tensor in self.tensors)


def counts(folder: str) -> dict[str, Any]:
    """Read after each pass how many points the worker has loaded."""
    model, optimizer = learner()
    data, seen = Counted(*DATA.tensors), []
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=4, num_workers=1):
            step(model, optimizer, x, y)
        seen.append(int(data.count))
    return {"seen": seen, **model.state_dict()}


def rewrites_its_status(folder: str) -> dict[str, Any]:
    """Write a line over the one before, in a file that is open all the time."""
    model, optimizer = learner()
    status = open(f"{folder}/status.txt", "w")  # noqa: SIM115  (open all the time)
    for epoch in range(5):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=8, shuffle=True)):
            step(model, optimizer, x, y)
            status.seek(0)
            status.write(f"{'x' * (number * 7 % 20)} {epoch} {number}\n")
            status.truncate()
            status.flush()
    status.close()
    return model.state_dict()


def gets_a_hidden_thread(folder: str) -> dict[str, Any]:
    """Have a thread that is not Python's from the third pass on."""
    twin_pace.SHARE = 0.5  # on a busy machine, where a fork takes long, the next one would be a minute away
    model, optimizer = learner()
    for epoch in range(10):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            print(epoch, step(model, optimizer, x, y), flush=True)
        if epoch == 1:
            faulthandler.dump_traceback_later(1000)
    faulthandler.cancel_dump_traceback_later()
    return model.state_dict()


def redirects_its_output(folder: str) -> dict[str, Any]:
    """Write what is printed into a file."""
    model, optimizer = learner()
    log = os.open(f"{folder}/out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.close(log)
    for epoch in range(6):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            step(model, optimizer, x, y)
        print("epoch", epoch, flush=True)
    return {}


def counts_at_the_head(folder: str) -> dict[str, Any]:
    """Append records to a long file, whose head says how many there are and is read back."""
    model, optimizer = learner()
    held, seen = open(f"{folder}/held.txt", "w"), []  # noqa: SIM115  (open all the time)
    held.write("0" * 8 + "x" * 20_000)
    held.flush()
    for number in range(5 * 12):
        for x, y in DataLoader(DATA, batch_size=96):
            step(model, optimizer, x, y)
        seen.append(int(Path(f"{folder}/held.txt").read_text()[:8]))
        held.seek(0)
        held.write(f"{seen[-1] + 1:08}")
        held.seek(0, os.SEEK_END)
        held.write(f"{number}\n")
        held.flush()
    held.close()
    return {"seen": seen, **model.state_dict()}


def starts_a_program(folder: str) -> dict[str, Any]:
    """Have another program write a file in the middle of a pass, and be killed right after it the first time."""
    model, optimizer = learner()
    for number, (x, y) in enumerate(DataLoader(DATA, batch_size=1)):
        step(model, optimizer, x, y)
        time.sleep(0.03 * (not os.path.exists(f"{folder}/made")))  # for twins to be there by then
        if number == 60 and not os.path.exists(f"{folder}/made"):
            subprocess.run(["touch", f"{folder}/made"], check=True)
            os.kill(os.getpid(), signal.SIGKILL)
    return {}


def reports_slowly(folder: str) -> dict[str, Any]:
    """Count, while lagom's thread, which reports on the rank, has a file open most of the time."""
    from lagom.worker.resource_usage import ResourceUsage

    now = ResourceUsage.now

    def slowly(usage: ResourceUsage) -> dict[str, Any]:
        with open("/proc/self/statm"):
            time.sleep(0.05)
            return now(usage)

    ResourceUsage.now = slowly  # type: ignore[assignment,method-assign]  # the rank's process ends with the run
    return evaluates(folder)


def large(num_forks: int) -> tuple[int, int]:
    """Train 16 MB of weights with as much momentum; return the MB in small pages before forks and after some.

    Args:
        num_forks: after so many forks and four more steps the program ends.
    """
    from lagom.snapshots import snapshot_pace

    twin_pace.SHARE = snapshot_pace.SHARE = 1.0
    forked, fork = [], os.fork

    def noted() -> int:
        forked.append(0)
        return fork()

    os.fork = noted
    model = nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    first, steps_left = 0, 4
    while steps_left:
        for (x,) in DataLoader(TensorDataset(torch.rand(64, 2048)), batch_size=8):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()
            first = first if forked else small_megabytes()
            steps_left -= bool(len(forked) >= num_forks and steps_left)
    return first, small_megabytes()


def small_megabytes() -> int:
    """Return the memory of this process, not of files, that is in small pages, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = {name: int(line.split()[1]) for line in lines if (name := line.split()[0]).startswith("Anon")}
    return (found["Anonymous:"] - found["AnonHugePages:"]) >> 10
