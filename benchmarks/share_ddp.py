"""Trains a program of ``benchmarks.share`` in one of several processes with DDP, as a person would change it by hand.

``python -m benchmarks.share_ddp NAME STEPS RANK RANKS FILE``. The processes meet by the file, and each trains on its
part of every batch.
"""

from __future__ import annotations

import json
import sys

import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.share_step import train

WITHOUT_DDP = ("towers", "teacher")
"""Programs that need other changes than the usual lines."""


def train_part(name: str, steps: int, rank: int, num_ranks: int, file: str) -> list[float]:
    """Train the program ``name`` as one of several ranks; return the CPU seconds of this process for each step."""
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=num_ranks)
    seconds = train(name, steps, DistributedDataParallel, lambda tensor: tensor.chunk(num_ranks)[rank])
    torch.distributed.destroy_process_group()
    return seconds


if __name__ == "__main__":
    name, steps, rank, num_ranks, file = sys.argv[1:]
    print(json.dumps(train_part(name, int(steps), int(rank), int(num_ranks), file)))
