"""Programs that get stuck; in a file that a rank imports without pytest."""

from __future__ import annotations

import ctypes
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lagom


class Samples(Dataset[torch.Tensor]):
    """Samples of which one never comes."""

    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stuck and index == 9:  # with shares, a sample of rank 1's
            never_ends("sleep")
        return torch.ones(2)


def never_ends(kind: str) -> None:
    if kind == "sleep":
        time.sleep(1000)
    while kind == "loop":
        time.sleep(0.01 + 0 * sum(range(10_000)))  # computes now and then, as tests beside this one want to
    if kind == "without Python":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # in C, and no other thread gets a turn


def train(kind: str) -> None:
    model = nn.Linear(2, 1)
    samples = Samples(stuck=kind == "worker")
    for number, batch in enumerate(DataLoader(samples, batch_size=4, num_workers=int(kind == "worker"))):
        if number == 1 and lagom.rank() == 1:
            never_ends(kind)
        model(batch).mean().backward()


def crossed() -> None:
    """A program that is distributed already, and whose ranks wait for each other."""
    dist.init_process_group("gloo")
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def skipped() -> None:
    """Rank 1 leaves out an exchange that the others come to."""
    dist.init_process_group()
    if lagom.rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(250))
