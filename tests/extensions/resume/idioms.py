"""Training programs as people write them: each ends with a value that tells whether it has gone on exactly."""

# ruff: noqa: B007, PERF401

from __future__ import annotations

import copy
import io
import logging
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

POINTS = torch.rand(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1)).double()


def weights(model: nn.Module) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


def one_function() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(DATA, batch_size=8, shuffle=True)
    history = []
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            history.append((epoch, loss.item()))
    return history, weights(model), torch.rand(2).tolist(), random.random(), float(np.random.rand())


def train_epoch(model: nn.Module, loader: Any, optimizer: Any, scheduler: Any = None) -> float:
    model.train()
    total, seen = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        total += loss.item() * len(x)
        seen += len(x)
    return total / seen


def evaluate(model: nn.Module, loader: Any) -> float:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.l1_loss(model(x), y, reduction="sum").item()
    return total / len(loader.dataset)


@torch.no_grad()
def evaluate_decorated(model: nn.Module, loader: Any) -> float:
    model.eval()
    return sum([nn.functional.l1_loss(model(x), y).item() for x, y in loader])


def early_stopping() -> Any:
    """Train in functions, keep the best weights, stop early, lower the rate on plateaus."""
    train_set, test_set = random_split(DATA, [16, 8])
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    train_loader, test_loader = DataLoader(train_set, batch_size=4, shuffle=True), DataLoader(test_set, batch_size=4)
    best, best_state, patience, log = float("inf"), model.state_dict(), 0, defaultdict(list)
    for epoch in range(6):
        loss: float = train_epoch(model, train_loader, optimizer)
        log["train"].append(loss)
        loss = evaluate(model, test_loader)
        log["decorated"].append(evaluate_decorated(model, test_loader))
        scheduler.step(loss)
        if loss < best:
            best, best_state, patience = loss, copy.deepcopy(model.state_dict()), 0
        else:
            patience += 1
            if patience >= 2:
                break
    model.load_state_dict(best_state)
    return dict(log), best, epoch, weights(model), optimizer.param_groups[0]["lr"]


def scheduled() -> Any:
    """Step a scheduler with each batch, with a closure in it."""
    model = network()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[3].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    warmup = 4
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    losses = [0.0]
    for _ in range(3):
        losses.append(train_epoch(model, DataLoader(DATA, batch_size=8, shuffle=True), optimizer, scheduler))
    return losses, scheduler.get_last_lr(), weights(model)


class Trainer:
    """A home-made trainer."""

    runs = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.callbacks = [self.log]
        self.history: list[tuple[int, float]] = []
        self.step = 0

    def log(self, loss: torch.Tensor) -> None:
        self.history.append((self.step, loss.item()))

    def fit(self, loader: Any, epochs: int) -> Trainer:
        for self.epoch in range(epochs):
            self.training_epoch(loader)
            self.history.append((-1, self.validate(loader)))
        return self

    def training_epoch(self, loader: Any) -> None:
        for batch_number, (x, y) in enumerate(loader):
            loss = self.compute(x, y)
            loss.backward()
            if batch_number % 2 == 1:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.step += 1
            for callback in self.callbacks:
                callback(loss)

    def compute(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def validate(self, loader: Any) -> float:
        self.model.eval()
        try:
            with torch.no_grad():
                found = [self.compute(x, y).item() for x, y in loader]
                for x, _ in loader:
                    found.append(self.model(x).sum().item())
                return sum(found)
        finally:
            self.model.train()


class Loud(Trainer):
    def training_epoch(self, loader: Any) -> None:
        super().training_epoch(loader)
        for x, _ in loader:
            self.step += len(x)


def trainer() -> Any:
    """Accumulate gradients in a class of one's own."""
    found = Loud(network()).fit(DataLoader(DATA, batch_size=8, shuffle=True), epochs=2)
    return found.history, found.step, found.epoch, weights(found.model)


def closures() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    recent: deque[float] = deque(maxlen=3)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        nonlocal steps
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        steps += 1
        return loss.item()

    def run(loader: Any) -> None:
        for x, y in loader:
            recent.append(train_step(x, y))

    for _ in range(2):
        run(DataLoader(DATA, batch_size=8, shuffle=True))
    return steps, list(recent), weights(model)


def while_loops() -> Any:
    """Count steps, with an iterator that begins anew; often enough for Python to specialise the call of next()."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=8, shuffle=True)
    batches, step, losses = iter(loader), 0, []
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            continue
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        losses.append(loss.item())
        if step == 20:
            break
    return losses, weights(model)


def bars() -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, counts = DataLoader(DATA, batch_size=8, shuffle=True), []
    for epoch in tqdm(range(2), disable=True):
        for number, (x, y) in enumerate(tqdm(loader, desc=f"epoch {epoch}", disable=True)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            counts.append(number)
        shown = io.StringIO()
        bar = tqdm(loader, leave=False, file=shown)
        for x, _ in bar:
            bar.set_postfix(rows=len(x))
        bar.set_postfix(all=bar.n)
        counts += [bar.n, "all=3" in shown.getvalue()]
    return counts, weights(model)


STEPS = 0
LOG: list[float] = []
COUNTED: list[tuple[int, int]] = []


def make_counter() -> Any:
    number = 0

    def counted() -> int:
        nonlocal number
        number += 1
        return number

    return counted


counter = make_counter()


class Totals:
    losses: list[float] = []  # noqa: RUF012
    best = float("inf")


def remember(loss: float, seen: list[float] = []) -> int:  # noqa: B006
    seen.append(loss)
    return len(seen)


def count(loss: float) -> None:
    global STEPS
    STEPS += 1
    Totals.losses.append(loss)
    Totals.best = min(Totals.best, loss)
    COUNTED.append((counter(), remember(loss)))
    LOG.append(loss)
    count.calls = getattr(count, "calls", 0) + 1  # type: ignore[attr-defined]


def global_variables() -> Any:
    global STEPS
    STEPS = 0
    LOG.clear()
    COUNTED.clear()
    Totals.losses, Totals.best = [], float("inf")
    first = counter(), remember(0.0)
    count.calls = 0  # type: ignore[attr-defined]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            count(loss.item())
    counted = [(one - first[0], other - first[1]) for one, other in COUNTED]
    return STEPS, list(LOG), counted, count.calls, Totals.losses, Totals.best, weights(model)  # type: ignore[attr-defined]


class Rows(Dataset[torch.Tensor]):
    """Random augmentation with torch's and numpy's generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return POINTS[index] + torch.rand(3, dtype=torch.float64) + float(np.random.rand()) + random.random()


def augmented() -> Any:
    generator = torch.Generator().manual_seed(3)
    loader, seen = DataLoader(Rows(), batch_size=4, shuffle=True, generator=generator), []
    for _ in range(3):
        for x in loader:
            seen.append(x.sum().item())
    return seen, torch.rand(1, generator=generator).item()


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in POINTS:
            yield row * 2


def streamed() -> Any:
    seen, model = [], network()
    for _ in range(2):
        for x in DataLoader(Stream(), batch_size=7):
            seen.append(model(x.sub_(x.mean())).sum().item())  # in place
    return seen


def several_loaders() -> Any:
    """Read two loaders in step, and one inside of the other."""
    first, second = DataLoader(DATA, batch_size=8, shuffle=True), DataLoader(Rows(), batch_size=4, shuffle=True)
    seen = []
    for (x, _), z in zip(first, second):  # noqa: B905
        seen.append((x.sum().item(), z.sum().item()))
        for rows in second:
            seen.append(rows.sum().item())
    return seen


def kept_tensors() -> Any:
    """Keep losses with their graphs, hidden states, gradients that are not used yet, views, and shared weights."""
    model: Any = network()
    model[3].weight = nn.Parameter(model[0].weight.detach()[:1].clone().repeat(1, 2))
    twin = nn.Linear(3, 6).double()
    twin.weight = model[0].weight
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD([*model.parameters(), twin.bias], lr=0.1)
    total: Any = 0
    losses, state = [], torch.zeros(1, dtype=torch.float64)
    flat = torch.zeros(6, dtype=torch.float64)
    view = flat[2:]
    for _ in range(2):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=6, shuffle=True)):
            loss = nn.functional.mse_loss(model(x) + twin(x).mean() + state, y)
            loss.backward()
            losses.append(loss)
            total += loss
            state = (state + loss).detach()
            view += 1
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
    assert twin.weight is model[0].weight
    return (
        [loss.item() for loss in losses],
        str(losses[-1]),
        total.item(),
        state.tolist(),
        flat.tolist(),
        weights(average),
    )


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged() -> Any:
    log, lines = logging.getLogger("snapshots.idioms"), Lines()
    log.handlers[:] = [lines]
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    for number, (x, _) in enumerate(DataLoader(DATA, batch_size=8)):
        log.info("%d %.6f", number, x.sum().item())
        log.debug("not kept")
    return lines.lines, torch.get_num_threads()


def matched() -> Any:
    seen = []
    for phase in ["train", "eval", "train"]:
        match phase:
            case "train":
                for x, _ in DataLoader(DATA, batch_size=8, shuffle=True):
                    seen.append(x.sum().item())
                else:
                    seen.append("end")
            case _:
                for x, _ in DataLoader(DATA, batch_size=12):
                    if len(seen) > 5:
                        break
                    seen.append(x.sum().item())
    return seen


EXACT = (
    *(one_function, early_stopping, scheduled, trainer, closures, while_loops, bars, global_variables, augmented),
    *(streamed, several_loaders, kept_tensors, logged, matched),
)
"""Programs that go on from most of their batches."""


def in_comprehension() -> Any:
    return [x.sum().item() for x, _ in DataLoader(DATA, batch_size=8)]


def in_generator() -> Any:
    def batches() -> Iterator[Any]:
        yield from DataLoader(DATA, batch_size=8)

    return sum(x.sum().item() for x, _ in batches())


def with_generator_in_flight() -> Any:
    numbers, found = (number for number in range(100)), []
    for x, _ in DataLoader(DATA, batch_size=8):
        found.append(x.sum().item() + next(numbers))
    return found


def with_live_graph() -> Any:
    total: Any = 0
    model = network()
    for x, _ in DataLoader(DATA, batch_size=12):
        total += (model(x) ** 2).sum()
    total.backward()
    return total.item()


def in_handler() -> Any:
    found = []
    try:
        raise ValueError("first")
    except ValueError:
        for x, _ in DataLoader(DATA, batch_size=8):
            found.append(x.sum().item())
    return found


REFUSED = {
    in_comprehension: "lambda, comprehension or class body",
    in_generator: "generator",
    with_generator_in_flight: "numbers (a generator) cannot be kept",
    with_live_graph: "total (a Tensor) cannot be kept",
    in_handler: "a statement at line",
}
"""Programs that cannot go on from where they are, and a part of the reason."""
