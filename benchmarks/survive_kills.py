"""Measures the whole time of a run that loses a rank three times: lagom, torchrun, and Ray Train.

    python -m benchmarks.survive_kills [--steps 6000] [--kills 3] [--only "lagom, snapshots"]

Two ranks of this machine train a layer of 1024 by 1024 with Adam (12 MB of state), in four forms: lagom with a snapshot
every 10 s; lagom without, which begins again from the start; torchrun --max-restarts with DDP, a DistributedSampler and
checkpoint code by hand, every 10 s; and the same program as a Ray Train trainer with max_failures, if Ray is installed
(pip install "ray[train]"). Each form runs once without a kill, and once with SIGKILLs of rank 1 that divide the time of
the first run into equal parts. The table has the seconds of both runs, and the seconds lost per kill.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

WORLD_SIZE = 2
SIZE, BATCH, ROWS = 1024, 8, 512
EVERY_S = 10.0
"""Seconds between two snapshots, or between two checkpoints."""
FORMS: dict[str, dict[str, Any]] = {
    "lagom, snapshots": {"snapshot_every_s": EVERY_S},
    "lagom, begins again": {},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Whole time of a run that loses ranks.")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--kills", type=int, default=3)
    forms: dict[str, Callable[[Path, int], None]] = {name: _by_lagom(settings) for name, settings in FORMS.items()}
    forms["torchrun, a checkpoint by hand"] = _by_torchrun
    if importlib.util.find_spec("ray") is not None:
        forms["Ray Train, a checkpoint by hand"] = _by_ray
    parser.add_argument("--only", nargs="+", choices=list(forms), default=list(forms))
    args = parser.parse_args(argv)
    forms = {name: forms[name] for name in args.only}
    with tempfile.TemporaryDirectory() as scratch:
        _by_lagom({})(Path(scratch, "first"), 10)  # starts the fork server, whose start must not count
        for number, (name, run) in enumerate(forms.items()):
            alone = _timed(run, Path(scratch, f"{number}-alone"), args.steps, [])
            kills = [alone * (kill + 1) / (args.kills + 1) for kill in range(args.kills)]
            killed = _timed(run, Path(scratch, f"{number}-killed"), args.steps, kills)
            lost = (killed - alone) / args.kills
            print(
                f"{name:32} {alone:6.1f} s, with {args.kills} kills {killed:6.1f} s: {lost:5.1f} s a kill", flush=True
            )
    return 0


def _timed(run: Callable[[Path, int], None], folder: Path, steps: int, kills: Sequence[float]) -> float:
    """Return the seconds of a run of ``steps``, whose rank 1 is killed at each of ``kills``, seconds from the start."""
    folder.mkdir()
    start = time.monotonic()

    def kill() -> None:
        for after in kills:
            time.sleep(max(0.0, start + after - time.monotonic()))
            os.kill(_pid(folder), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    run(folder, steps)
    seconds = time.monotonic() - start
    thread.join()
    return seconds


def _pid(folder: Path) -> int:
    """Wait for a living process of rank 1, and return its pid."""
    while True:
        for path in folder.glob("runs/*/run.json"):
            ranks = json.loads(path.read_text()).get("ranks", {})
            if _lives(pid := int(ranks.get("1", {}).get("pid", 0))):
                return pid
        own = folder / "pid-1"
        if own.exists() and own.read_text() and _lives(pid := int(own.read_text())):
            return pid
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def train(steps: int) -> float:
    """Train for at least ``steps`` batches of a loader, in whole passes; return the last loss."""
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(ROWS, SIZE))
    done, loss = 0, torch.zeros(())
    while done < steps:
        for (rows,) in DataLoader(data, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            done += 1
    return loss.item()


def _by_lagom(settings: dict[str, Any]) -> Callable[[Path, int], None]:
    def run(folder: Path, steps: int) -> None:
        config = TorchDistributedConfig(
            world_size=WORLD_SIZE,
            launcher="local",
            run_dir=folder / "runs",
            max_failures=10,
            hparams={"steps": steps},
            **settings,
        )
        experiment.lagom(train, config)

    return run


SCRIPT = f"""\
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
(folder / f"pid-{{rank}}").write_text(str(os.getpid()))
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear({SIZE}, {SIZE}))
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn({ROWS}, {SIZE}))
sampler = DistributedSampler(data)
done = epoch = 0
if (folder / "last.pt").exists():
    state = torch.load(folder / "last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done, epoch = state["done"], state["epoch"]
saved = time.monotonic()
while done < steps:
    sampler.set_epoch(epoch)
    for (rows,) in DataLoader(data, batch_size={BATCH // WORLD_SIZE}, sampler=sampler):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        done += 1
    epoch += 1
    if rank == 0 and time.monotonic() - saved > {EVERY_S}:
        state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done, "epoch": epoch}}
        torch.save(state, folder / "next.pt")
        os.replace(folder / "next.pt", folder / "last.pt")
        saved = time.monotonic()
torch.distributed.destroy_process_group()
"""


def _by_torchrun(folder: Path, steps: int) -> None:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}", "--max-restarts=10")
    command = [sys.executable, *launch, str(script), str(folder), str(steps)]
    with (folder / "log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)


RAY_SCRIPT = f"""\
import os, sys, tempfile, time
from pathlib import Path
import ray.train, torch
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def loop(config):
    folder, steps, rank = Path(config["folder"]), config["steps"], ray.train.get_context().get_world_rank()
    (folder / f"pid-{{rank}}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = prepare_model(nn.Linear({SIZE}, {SIZE}))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn({ROWS}, {SIZE}))
    sampler = DistributedSampler(data)
    done = epoch = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            state = torch.load(Path(path, "last.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, epoch = state["done"], state["epoch"]
    saved = time.monotonic()
    while done < steps:
        sampler.set_epoch(epoch)
        for (rows,) in DataLoader(data, batch_size={BATCH // WORLD_SIZE}, sampler=sampler):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            done += 1
        epoch += 1
        is_due = torch.tensor(float(time.monotonic() - saved > {EVERY_S}))
        torch.distributed.broadcast(is_due, 0)  # all ranks report together
        if is_due:
            state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done, "epoch": epoch}}
            with tempfile.TemporaryDirectory() as path:
                if rank == 0:
                    torch.save(state, Path(path, "last.pt"))
                kept = ray.train.Checkpoint.from_directory(path) if rank == 0 else None
                ray.train.report({{"epoch": epoch}}, checkpoint=kept)
            saved = time.monotonic()

ray.init(num_cpus={WORLD_SIZE + 1}, include_dashboard=False)
TorchTrainer(
    loop,
    train_loop_config={{"folder": sys.argv[1], "steps": int(sys.argv[2])}},
    scaling_config=ray.train.ScalingConfig(num_workers={WORLD_SIZE}),
    run_config=ray.train.RunConfig(
        storage_path=str(Path(sys.argv[1], "ray")),
        failure_config=ray.train.FailureConfig(max_failures=10, controller_failure_limit=10),
    ),
).fit()
"""


def _by_ray(folder: Path, steps: int) -> None:
    script = folder / "script.py"
    script.write_text(RAY_SCRIPT)
    with (folder / "log").open("w") as log:
        subprocess.run([sys.executable, str(script), str(folder), str(steps)], stdout=log, stderr=log, check=True)


if __name__ == "__main__":
    sys.exit(main())
