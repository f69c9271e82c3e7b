"""Measures the time per step at each zero_lvl, and compares with torch's and DeepSpeed's ZeRO by hand; 2 ranks, Adam.

    python -m benchmarks.zero_step [--starts 3] [--turns 12] [--width 1800] [--only NAME ...]

The model is an MLP of three square layers. A contender and its peer are alive at the same time, without other
contenders, and take turns of a few steps in alternating order. The speed of a process also depends on the addresses of
its memory, so each pair is started several times. A ratio divides the two medians of a start; the table has the median
and the quartiles over starts. The peers are distributed by hand: DDP with ZeroRedundancyOptimizer for levels up to 2,
FSDP2 for level 3. lagom starts the peers' ranks, but does not distribute the programs. If DeepSpeed is installed,
lagom's backend="deepspeed" is compared with DeepSpeed by hand at each stage, with equal buckets. No program asks for
``fused=True``: peers step with torch's default Adam, and lagom, whose batches are split, with torch's fused one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lagom
from benchmarks import deepspeed_by_hand
from benchmarks.step import Contender
from benchmarks.step_programs import Clock, Task
from lagom import experiment
from lagom.config import TorchDistributedConfig

WORLD_SIZE = 2
WARM_UP = 3
"""Turns at the start that do not count."""
BATCH = 64
"""Samples per rank and step."""
_DRIVEN, _BY_DEEPSPEED = "backend=deepspeed, zero_lvl=", "DeepSpeed by hand, stage "
PEERS = {
    "zero_lvl=0": "by hand",
    "zero_lvl=1": "by hand",
    "zero_lvl=2": "by hand",
    "zero_lvl=3": "FSDP2 by hand",
    **{f"{_DRIVEN}{stage}": f"{_BY_DEEPSPEED}{stage}" for stage in deepspeed_by_hand.STAGES},
}
JUDGED = tuple(name for name in PEERS if name != "zero_lvl=0")
TARGET = 1.05


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print medians, quartiles and ratios; return 0 if the target holds, else 1."""
    args = _arguments(argv)
    print(f"{'MLP of 3 layers, ' + str(args.width) + ' wide':36} median ms   its peer's   of its peer's  quartiles")
    held = True
    for name in _names(args.only):
        starts = [_measured(name, args.width, args.turns) for _ in range(args.starts)]
        own, peer = (statistics.median(column) for column in zip(*starts, strict=True))
        less, ratio, more = _quartiles([one / other for one, other in starts])
        verdict = "" if name not in JUDGED else "holds" if ratio <= TARGET else "MISSED"
        held &= verdict != "MISSED"
        print(f"{name:36} {own:9.3f} {peer:12.3f} {ratio:14.2f}x  {less:.2f} {more:.2f}  {verdict}", flush=True)
    print(f"{'holds' if held else 'MISSED'}: a level takes at most {TARGET} times what its peer by hand does")
    return 0 if held else 1


def _measured(name: str, width: int, turns: int) -> tuple[float, float]:
    """Start a contender and its peer once; return the milliseconds per step of both, as medians of their turns."""
    pair = (name, PEERS[name])
    times: dict[str, list[float]] = {one: [] for one in pair}
    with contenders(width, turns, pair) as able:
        for number in range(WARM_UP + turns):
            for one in pair if number % 2 else pair[::-1]:
                seconds = able[one].turn(_task(width).steps)
                if number >= WARM_UP:
                    times[one].append(1e3 * seconds)
    return statistics.median(times[name]), statistics.median(times[PEERS[name]])


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def _names(only: Sequence[str] | None) -> list[str]:
    """Return the contenders to measure: those in ``only`` (None: all) whose peers are installed."""
    able = [name for name in PEERS if only is None or name in only]
    if not deepspeed_by_hand.is_here():
        print(deepspeed_by_hand.MISSING)
        able = [name for name in able if not name.startswith(_DRIVEN)]
    return able


@contextmanager
def contenders(width: int, turns: int, names: Sequence[str]) -> Iterator[dict[str, Contender]]:
    """Start the named contenders, and yield them when every rank is ready for its first turn."""
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as folder:
        arguments = {"port": listener.getsockname()[1], "turns": WARM_UP + turns, "width": width}
        started = {name: _started(name, arguments, folder) for name in names}
        try:
            _connect(listener, started)
            yield started
            for one in started.values():
                one.process.wait(timeout=60)
        finally:
            for one in started.values():
                one.process.terminate()
                one.process.wait()
                one.errors.close()


def _started(name: str, arguments: Mapping[str, object], folder: str) -> Contender:
    command = [sys.executable, "-m", "benchmarks.zero_step", "--contender", name, json.dumps(arguments)]
    errors = open(os.path.join(folder, name), "w+")  # noqa: SIM115  (closed with its contender)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True, env=environment)
    return Contender(process, errors)


def _connect(listener: socket.socket, started: Mapping[str, Contender]) -> None:
    listener.settimeout(1)
    deadline = time.monotonic() + 120
    while any(len(one.ranks) < WORLD_SIZE for one in started.values()):
        for name, one in started.items():
            if one.process.poll() is not None:
                one.errors.seek(0)
                raise RuntimeError(f"{name} has ended: {one.errors.read()[-2000:]}")
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
            continue
        connection.settimeout(120)
        lines = connection.makefile("rw")
        hello = json.loads(lines.readline())
        started[hello["contender"]].ranks[hello["rank"]] = lines


def plain(arguments: Mapping[str, Any]) -> None:
    """Train with an ordinary loop for one process, which lagom runs on ranks."""
    clock, task = Clock(arguments, lagom.rank()), _task(arguments["width"])
    torch.set_num_threads(1)
    model = task.module()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loader = DataLoader(_data(task), batch_size=BATCH * WORLD_SIZE, shuffle=True)
    _train(clock, task, loader, model, optimizer)


def by_hand(arguments: Mapping[str, Any]) -> None:
    """Train with DDP and ZeroRedundancyOptimizer by hand."""
    torch.distributed.init_process_group("gloo")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    clock, task = Clock(arguments, torch.distributed.get_rank()), _task(arguments["width"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = _data(task)
    model = nn.parallel.DistributedDataParallel(task.module())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    _train(clock, task, loader, model, optimizer)


def fsdp_by_hand(arguments: Mapping[str, Any]) -> None:
    """Train with FSDP2 by hand: each linear layer is sharded, then the whole model."""
    torch.distributed.init_process_group("gloo")
    from torch.distributed.fsdp import fully_shard

    clock, task = Clock(arguments, torch.distributed.get_rank()), _task(arguments["width"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = _data(task)
    model = task.module()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    _train(clock, task, loader, model, optimizer)


def deepspeed(arguments: Mapping[str, Any]) -> None:
    """Train with DeepSpeed's engine by hand, at the stage that ends the contender's name."""
    deepspeed_by_hand.join()
    clock, task = Clock(arguments, torch.distributed.get_rank()), _task(arguments["width"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = _data(task)
    network = task.module()
    made = torch.optim.Adam(network.parameters(), lr=1e-4)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    stage = int(arguments["contender"][-1])
    with deepspeed_by_hand.engine(network, made, stage, BATCH) as (engine, optimizer):
        _train(clock, task, loader, engine, optimizer)


BY_HAND = {
    "by hand": by_hand,
    "FSDP2 by hand": fsdp_by_hand,
    **{f"{_BY_DEEPSPEED}{stage}": deepspeed for stage in deepspeed_by_hand.STAGES},
}


def _train(clock: Clock, task: Task, loader: DataLoader[Any], model: nn.Module, optimizer: Any) -> None:
    clock.start(task)
    while True:
        for x, y in loader:
            if clock.is_over():
                return
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
            optimizer.step()


def _task(width: int) -> Task:
    def module() -> nn.Module:
        layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return Task(module, (width,), (width,), per_rank=BATCH, steps=3 if width > 500 else 20)


def _data(task: Task) -> TensorDataset:
    count = BATCH * WORLD_SIZE * 50
    return TensorDataset(torch.randn(count, *task.input), torch.randn(count, *task.output))


def _run(contender: str, arguments: Mapping[str, Any]) -> None:
    logging.getLogger("lagom").setLevel(logging.ERROR)
    hparams = {"arguments": {**arguments, "contender": contender}}
    level = 0 if contender in BY_HAND else int(contender[-1])
    backend: Any = "deepspeed" if contender.startswith(_DRIVEN) else "torch"
    config = TorchDistributedConfig(
        hparams=hparams,
        world_size=WORLD_SIZE,
        launcher="local",
        batches="split",
        seed=0,
        zero_lvl=level,
        backend=backend,
        deepspeed_config={"zero_optimization": deepspeed_by_hand.BUCKETS} if backend == "deepspeed" else None,
    )
    experiment.lagom(BY_HAND.get(contender, plain), config)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time per step, beside ZeroRedundancyOptimizer and FSDP2.")
    parser.add_argument("--starts", type=int, default=3, help="how often a pair is started anew")
    parser.add_argument("--turns", type=int, default=12, help="turns that count, of each in each start")
    parser.add_argument("--width", type=int, default=1800, help="of the layers: 1800 makes 10 million parameters")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), help="of the levels; their peers come along")
    return parser.parse_args(argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contender"]:
        _run(sys.argv[2], json.loads(sys.argv[3]))
        sys.exit(0)
    sys.exit(main())
