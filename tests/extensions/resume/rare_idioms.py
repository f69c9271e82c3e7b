"""Programs that keep a state where few programs do: in other modules, caches, views, replaced functions."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.extensions.resume import counted_batches
from tests.extensions.resume.idioms import DATA, POINTS, network, weights


def batches(size: int = 8) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=size, shuffle=True)


class Shuffled:
    """An iterator that shuffles each time it is asked to begin."""

    def __iter__(self) -> Shuffled:
        self.order, self.at = torch.randperm(24), 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == 24:
            raise StopIteration
        self.at += 6
        return POINTS[self.order[self.at - 6 : self.at]]


def iterator_of_ones_own() -> Any:
    seen = [x.sum().item() for x in Shuffled()]
    for x in Shuffled():
        seen.append(x.sum().item())
        for y, _ in batches(12):
            seen.append(y.sum().item())
    return seen


def recursive(depth: int = 2) -> Any:
    seen = [recursive(depth - 1)] if depth else []
    for x, _ in batches(12):
        seen.append(x.sum().item())
    return [*seen, recursive(0)] if depth == 1 else seen


def other_modules() -> Any:
    """Change variables of a module without functions, and of one that is imported in a function."""
    from tests.extensions.resume import counted_losses

    counted_batches.NUMBER = counted_losses.NUMBER = 0
    for _ in batches():
        counted_batches.NUMBER += 1
        counted_losses.count()
    return counted_batches.NUMBER, counted_losses.NUMBER


def add(x: torch.Tensor) -> float:
    return x.sum().item()


class Score:
    def of(self, x: torch.Tensor) -> float:
        return x.sum().item()


criterion: Any = add


def replaced_functions() -> Any:
    global criterion
    criterion, seen = torch.sum, []
    Score.of = lambda self, x: x.mean().item()  # type: ignore[method-assign]
    for x, _ in batches():
        seen.append((float(criterion(x)), Score().of(x)))
    return seen


def unsaved_hooks() -> Any:
    seen: list[str] = []
    model = network()
    model.register_forward_hook(lambda *_: seen.append("first"))
    for _ in range(2):
        for x, _ in batches(12):
            model(x)
        later = model.register_forward_hook(lambda *_: seen.append("later"))
        model(x)
        later.remove()
    return seen


def view_of_a_parameter() -> Any:
    model = nn.Linear(3, 1).double()
    optimizer, flat = torch.optim.SGD(model.parameters(), lr=5.0), model.weight.view(-1)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        flat.data.clamp_(-0.1, 0.1)
    return weights(model)


def autocast() -> Any:
    seen, model = [], nn.Linear(3, 1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for x, _ in batches():
            seen.append(model(x.float()).sum().item())
    return seen


def settings() -> Any:
    """Change a variable of the environment that was there before; keep bytes; leave blocks by a stack."""
    os.environ["PATH"], kept, ends = os.environ["PATH"] + ":/", io.BytesIO(), list[str]()
    torch.save(torch.ones(2), kept)
    with contextlib.ExitStack() as stack:
        stack.callback(ends.append, "end")
        for _ in batches():
            os.environ["PATH"] += ":/"
    return os.environ["PATH"].count(":/") - os.environ["PATH"].count(":/u"), len(kept.getvalue()), ends


def counter(start: int) -> Any:
    total = start

    def add_one() -> int:
        nonlocal total
        total += 1
        return total

    return add_one


def equal_cells() -> Any:
    """Share a variable with functions, while another call's functions share one that has the same value."""
    one, other = counter(0), counter(0)
    total = 0
    read = lambda: total  # noqa: E731
    for _ in batches():
        total = one()
        other()
    return one(), other(), read(), total  # type: ignore[no-untyped-call]


def annotated_cells() -> Any:
    """Annotate variables that functions share, one of which has no value yet."""
    seen: list[float] = []
    keep: Any = lambda: seen.append(total)  # noqa: E731
    for x, _ in batches():
        total: float = x.sum().item()
        keep()
    best: float
    later: list[float] = []

    def find() -> None:
        nonlocal best
        best = max(seen)
        later.append(best)

    find()
    return seen, best, later


def changed_tensors() -> Any:
    """Ask how often tensors were changed in place."""
    fresh, changed, leaf = torch.zeros(2), torch.zeros(2), torch.zeros(2, requires_grad=True)
    view = changed[:1]
    for _ in batches():
        changed += 1
    return fresh._version, changed.tolist(), view.tolist(), leaf.requires_grad, leaf._version


EXACT = (
    *(iterator_of_ones_own, recursive, other_modules, replaced_functions, unsaved_hooks, view_of_a_parameter),
    *(autocast, settings, equal_cells, annotated_cells, changed_tensors),
)
"""Programs that go on from most of their batches."""


class Counting(IterableDataset[torch.Tensor]):
    """Counts the rows that it has given."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in POINTS:
            self.count += 1
            yield row


def counting_stream() -> int:
    data = Counting()
    for _ in DataLoader(data, batch_size=7):
        pass
    return data.count
