"""Measures the bytes that a rank holds with Adam in float32: with lagom at each zero_lvl, torch by hand, and DeepSpeed.

    python -m benchmarks.zero_memory [--million 100] [--world-size 2] [--only NAME ...]

The model is an MLP with about ``--million`` million parameters. All large tensors that are alive are counted before and
after the third backward: parameters, gradients (the bytes that the backward has added), and the rest, which is the
optimizer's state. The first peak is the most memory (VmHWM) of the process while the model is made, the second its most
memory in the third forward, backward and step, each less its memory before the model was made. Formulas give bytes per
parameter for N ranks. DeepSpeed runs if it is installed, driven by lagom (backend="deepspeed") and by hand. It keeps
buckets, and a copy of the parameters that a rank steps; these count as "other".
"""

from __future__ import annotations

import argparse
import gc
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import deepspeed_by_hand
from lagom import experiment
from lagom.config import TorchDistributedConfig

_Formula = Callable[[int], tuple[float, float, float]]
_LEVELS: tuple[_Formula, ...] = (
    lambda n: (4, 4, 8),
    lambda n: (4, 4, 8 / n),
    lambda n: (4, 4 / n, 8 / n),
    lambda n: (4 / n, 4 / n, 8 / n),
)
FORMULAS: Mapping[str, _Formula] = {
    **{f"zero_lvl={level}": formula for level, formula in enumerate(_LEVELS)},
    "ZeroRedundancyOptimizer": _LEVELS[1],
    "FSDP2": _LEVELS[3],
    **{f"backend=deepspeed, zero_lvl={level}": formula for level, formula in enumerate(_LEVELS)},
    **{f"DeepSpeed by hand, stage {level}": formula for level, formula in enumerate(_LEVELS)},
}
"""Functions from the number of ranks to three numbers of bytes per parameter: parameters, gradients, the rest."""
LAYERS = 6
BATCH = 8
Figures = tuple[int, int, int, int, int]
"""Bytes of parameters, gradients and the rest, then the bytes of both peaks."""
TOLERANCE = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; return 0 if lagom is within 10% of the formula on all ranks, else 1."""
    args = _arguments(argv)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    width = int((args.million * 1e6 / LAYERS) ** 0.5)
    count = sum(p.numel() for p in model(width, device="meta").parameters())
    print(f"{count / 1e6:.1f} million parameters, {args.world_size} ranks; MB")
    columns = ("parameters", "gradients", "other", "in all", "formula", "made at", "peak")
    print(" " * 36 + "".join(f"{column:>12}" for column in columns))
    held = True
    if not deepspeed_by_hand.is_here():
        print(deepspeed_by_hand.MISSING)
    for name, formula in FORMULAS.items():
        if (args.only and name not in args.only) or ("eep" in name and not deepspeed_by_hand.is_here()):
            continue
        rows = measured(name, width, args.world_size)
        wanted = sum(formula(args.world_size)) * count / 1e6
        for rank, row in enumerate(rows):
            *parts, made, peak = (value / 1e6 for value in row)
            figures = "".join(f"{value:12.1f}" for value in (*parts, sum(parts), wanted, made, peak))
            print(f"{name + f', rank {rank}':36}{figures}")
            held &= not name.startswith("zero_lvl") or abs(sum(parts) / wanted - 1) <= TOLERANCE
    print(f"{'holds' if held else 'MISSED'}: lagom is within {TOLERANCE:.0%} of the formula on every rank")
    return 0 if held else 1


def measured(name: str, width: int, world_size: int) -> Sequence[Figures]:
    """Run contender ``name``, and return the figures of each rank."""
    by_hand = BY_HAND.get(name)
    level = int(name[-1]) if name[-1].isdigit() else 0
    hparams: dict[str, Any] = {"width": width}
    if name.startswith("DeepSpeed"):
        by_hand, hparams["stage"] = deepspeed, level
    backend: Any = "deepspeed" if name.startswith("backend=deepspeed") else "torch"
    config = TorchDistributedConfig(
        hparams=hparams,
        world_size=world_size,
        launcher="local",
        batches="split",
        seed=0,
        zero_lvl=0 if by_hand is not None else level,
        backend=backend,
        deepspeed_config={"zero_optimization": deepspeed_by_hand.BUCKETS} if backend == "deepspeed" else None,
    )
    rows: Sequence[Figures] = experiment.lagom(by_hand or train, config).per_rank
    return rows


def train(width: int) -> Figures:
    """Measure an ordinary program for one process, which lagom runs on ranks."""
    base = _start()
    network = model(width)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    return _steps(network, optimizer, width, base)


def zero_by_hand(width: int) -> Figures:
    """Measure DDP with ZeroRedundancyOptimizer by hand; lagom only starts the ranks."""
    torch.distributed.init_process_group("gloo")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    base = _start()
    network = nn.parallel.DistributedDataParallel(model(width), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(network.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4)
    return _steps(network, optimizer, width, base)


def fsdp_by_hand(width: int) -> Figures:
    """Measure FSDP2 by hand: each linear layer is sharded, then the whole model; lagom only starts the ranks."""
    torch.distributed.init_process_group("gloo")
    from torch.distributed.fsdp import fully_shard

    base = _start()
    network = model(width)
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    return _steps(network, optimizer, width, base)


def deepspeed(width: int, stage: int) -> Figures:
    """Measure DeepSpeed's engine by hand; lagom only starts the ranks."""
    deepspeed_by_hand.join()
    base = _start()
    network = model(width)
    made = torch.optim.Adam(network.parameters(), lr=1e-4)
    with deepspeed_by_hand.engine(network, made, stage, BATCH) as (engine, optimizer):
        return _steps(engine, optimizer, width, base)


BY_HAND: Mapping[str, Callable[..., Figures]] = {
    "ZeroRedundancyOptimizer": zero_by_hand,
    "FSDP2": fsdp_by_hand,
}


def _start() -> int:
    """Return the bytes that the process uses now, and reset the kernel's peak (VmHWM)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _steps(network: nn.Module, optimizer: Any, width: int, base: int) -> Figures:
    made = _status("VmHWM") - base
    for number in range(3):
        optimizer.zero_grad()
        parameters, before = _held(network)
        if number == 2:
            _start()
        loss = network(torch.randn(BATCH, width)).square().mean()
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        _, after = _held(network)
        optimizer.step()
    rest = before if after > before else before - parameters  # DDP's buckets, as gradients, exist before the backward
    return parameters, after - rest, rest, made, _status("VmHWM") - base


def model(width: int, device: str = "cpu") -> nn.Sequential:
    """Return an MLP of square layers, each ``width`` by ``width``."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, device=device), nn.Tanh())]
    return nn.Sequential(*layers)


def _held(network: nn.Module) -> tuple[int, int]:
    """Return the bytes of parameters, and of all other large tensors except activations."""
    parameters = [_local(p) for p in network.parameters()]
    # Read autograd's own attribute: at levels 2 and 3, Parameter.grad would gather the whole gradient.
    slot: Any = vars(torch._C.TensorBase)["grad"]
    gradients = [_local(gradient) for p in network.parameters() if (gradient := slot.__get__(p)) is not None]
    every = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.numel() > BATCH * 10_000]
    parts = [one for one in every if one.dtype == torch.uint8]  # shards of parameters, with zero_lvl=3
    counted: set[int] = set()
    return _bytes([*parameters, *parts], counted), _bytes([*gradients, *every], counted)


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor of FSDP2, or ``tensor`` itself."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _bytes(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = torch._C.TensorBase.untyped_storage(tensor)  # the tensor's method would gather a whole parameter
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes held on each rank, beside the formula.")
    parser.add_argument("--million", type=float, default=100.0, help="parameters")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(FORMULAS), help="of the contenders")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
