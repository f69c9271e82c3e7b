"""Programs that cannot go on from where they are, each for another reason."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

from tests.extensions.resume.idioms import DATA, network
from tests.extensions.resume.rare_idioms import batches


def all_variables(first: int = 1) -> Any:
    for x, _ in batches(24):
        first += len(x)
    del x
    return sorted(locals())


def drain(queue: list[int]) -> int:
    for _ in batches():
        queue.pop()
    return len(queue)


def text_before_a_call() -> Any:
    queue = [1, 2, 3]
    return f"{queue} {drain(queue)}"


def condition_before_a_call() -> Any:
    queue = [1, 2, 3]
    return drain(queue) if queue else -1


@functools.cache
def cached_model() -> nn.Module:
    return network()


def cache() -> Any:
    cached_model()
    for x, _ in batches():
        cached_model()(x)
    cached_model.cache_clear()  # another test may have the same process


def other_output() -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        for x, _ in batches():
            print(x.sum().item(), file=sys.stdout)


def rewritten_file() -> Any:
    """Keep a line at the begin of a file up to date."""
    with open(os.path.join(tempfile.gettempdir(), f"lagom-{os.getpid()}.txt"), "w") as file:
        for number, _ in enumerate(batches()):
            file.seek(0)
            file.write(f"{number:9}\n" * (1 if number else 2))
            file.flush()
    os.unlink(file.name)


def read_and_written_file() -> Any:
    with open(os.path.join(tempfile.gettempdir(), f"lagom-{os.getpid()}.txt"), "w+") as file:
        for x, _ in batches():
            file.write(f"{x.sum().item()}\n")
            file.flush()
    os.unlink(file.name)


def held_lock() -> Any:
    with threading.RLock():
        for _ in batches():
            pass


def drawn_later() -> Any:
    """Draw from the generator of a sampler that draws from it again in the middle of a pass."""
    generator, seen = torch.Generator().manual_seed(3), []
    sampler = RandomSampler(DATA, replacement=True, num_samples=80, generator=generator)
    for x, _ in DataLoader(DATA, batch_size=10, sampler=sampler):
        seen.append((x.sum().item(), torch.rand(1, generator=generator).item()))
    return seen


@torch.no_grad()
def evaluated() -> float:
    total = 0.0
    for x, _ in batches():
        total += x.sum().item()
    return total


def in_finally() -> Any:
    seen: list[float] = []
    try:
        seen.append(0.0)
    finally:
        for x, _ in batches():
            seen.append(x.sum().item())
    return seen


class Summed:
    total = 0

    def add(self) -> None:
        self.total += drain([1, 2, 3])


def attribute_before_a_call() -> int:
    summed = Summed()
    summed.add()
    return summed.total


class Backwards(Sampler[int]):
    """A sampler of one's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(23, -1, -1))


def own_sampler() -> None:
    for _ in DataLoader(DATA, batch_size=8, sampler=Backwards()):
        pass


def inference() -> None:
    with torch.inference_mode():
        for _ in batches():
            pass


def hooked_tensor() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda grad: grad * 2)
    for _ in batches():
        pass


def table() -> str:
    file = io.StringIO()
    rows = csv.writer(file)
    for x, _ in batches():
        rows.writerow(x.sum(dim=1).tolist())
    return file.getvalue()


def events_far_away() -> Any:
    """Write TensorBoard's events to a URL, where a file cannot be cut."""
    from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem, register_filesystem
    from torch.utils.tensorboard import SummaryWriter

    class Nowhere(LocalFileSystem):  # type: ignore[misc]
        """Keeps nothing."""

        def write(self, filename: str, file_content: Any, binary_mode: bool = False) -> None:
            """Do nothing."""

        append = write

        def makedirs(self, path: str) -> None:
            """Do nothing."""

    register_filesystem("nowhere", Nowhere())
    with SummaryWriter("nowhere://bucket/run"):
        for _ in batches():
            pass


REFUSED = {
    events_far_away: "TensorBoard's events go elsewhere",
    evaluated: "is between the program and its loader",
    in_finally: "that cannot be resumed",
    attribute_before_a_call: "has read self.total before its call",
    own_sampler: "a sampler of the program's own",
    inference: "_InferenceMode",
    hooked_tensor: "a tensor has hooks",
    table: "a writer) cannot be kept",
    text_before_a_call: "has read queue (a list) before its call",
    condition_before_a_call: "has read queue (a list) before its call",
    cache: "is a cache that holds values",
    other_output: "another stream in the place of sys.stdout",
    held_lock: "a lock is held",
    rewritten_file: "is changed before its end",
    read_and_written_file: "is changed before its end",
    drawn_later: "a sampler of the program's own",
    all_variables: "calls locals()",
}
"""Programs that cannot go on from where they are, and a part of the reason."""
