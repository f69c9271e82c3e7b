"""``verify`` of ordinary programs: it accepts "whole" for all, and refuses "split" where the result would differ."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lagom.config import TorchDistributedConfig
from lagom.errors import VerificationError
from lagom.extensions.verify.rehearsals import verify
from lagom.launch import choose
from lagom.plan import plan
from lagom.program.signature import Call

INPUTS = torch.rand(53, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
LABELS = (INPUTS.sum(1) > 3).long()
DATA = TensorDataset(INPUTS, LABELS)
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loader(data: Dataset[Any] = DATA, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, **{"shuffle": True, **options})


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def steps(
    batches: Iterable[Any], criterion: Criterion = F.cross_entropy, model: nn.Module | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Train over ``batches``; yields loss and outputs of each."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in batches:
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, outputs


def trained(batches: Iterable[Any], criterion: Criterion = F.cross_entropy) -> list[torch.Tensor]:
    model = network()
    list(steps(batches, criterion, model))
    return [parameter.detach() for parameter in model.parameters()]


def accuracy_of_the_whole_set_as_a_tensor() -> Any:
    correct = torch.zeros(())
    for _, outputs in steps(loader()):
        correct += (outputs[:, 0] > 0).sum()
    return correct / len(DATA)


def prints_every_hundredth() -> None:
    seen = []
    for loss, _ in steps(itertools.chain.from_iterable(loader() for _ in range(40))):
        seen.append(loss.item())
        if len(seen) % 100 == 0:
            print("loss", seen[-1])


def logs_losses_to_standard_output() -> None:
    log = logging.getLogger("program")
    log.handlers, log.propagate = [logging.StreamHandler(sys.stdout)], False
    log.handlers[0].setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    for loss, _ in steps(loader()):
        log.warning("loss %.4f", loss)


def features_of_the_training_set() -> Any:
    model = network()
    list(steps(loader(), model=model))
    return float(np.concatenate([model(x).detach().numpy() for x, _ in loader(shuffle=False)]).mean())


def statistics_of_the_training_set() -> Any:
    total = torch.zeros(6, dtype=torch.float64)
    for inputs, _ in loader(shuffle=False):
        total += inputs.sum(0)
    return trained((inputs - total / len(DATA), labels) for inputs, labels in loader())


def object_of_outputs() -> Any:
    return SimpleNamespace(outputs=[outputs.detach() for _, outputs in steps(loader())])


def noise_in_the_loop() -> Any:
    return trained((inputs + torch.randn_like(inputs), labels) for inputs, labels in loader())


def looks_at_a_batch_first() -> Any:
    next(iter(loader()))
    return trained(loader())


def workers_that_stay() -> Any:
    batches = loader(num_workers=1, persistent_workers=True)
    return trained(itertools.chain.from_iterable(batches for _ in range(5)))


def rate_by_the_length_of_the_loader() -> Any:
    batches = loader()
    optimizer = torch.optim.SGD(network().parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6 * len(batches))
    for _ in range(6):
        for _ in steps(batches):
            optimizer.step()
            schedule.step()
    return schedule.get_last_lr()


def prints_process_and_object() -> Any:
    print(os.getpid(), object(), np.random.default_rng().integers(10**9))
    return trained(loader())


def one_batch() -> Any:
    return trained(itertools.chain.from_iterable(DataLoader(DATA, batch_size=64) for _ in range(5)))


WRONG = (
    accuracy_of_the_whole_set_as_a_tensor,
    prints_every_hundredth,
    logs_losses_to_standard_output,
    features_of_the_training_set,
    statistics_of_the_training_set,
    object_of_outputs,
    noise_in_the_loop,
)
RIGHT = (
    looks_at_a_batch_first,
    workers_that_stay,
    rate_by_the_length_of_the_loader,
    prints_process_and_object,
    one_batch,
)


def verdict(program: Callable[[], Any], batches: Any) -> str:
    launcher = choose("local")
    call = Call(function=program, provided={"hparams": {}})
    config = TorchDistributedConfig(launcher="local", world_size=2, seed=0, batches=batches)
    return verify(launcher, plan(config, launcher.cluster()), call).verdict


@pytest.mark.soak
@pytest.mark.parametrize("program", [*WRONG, *RIGHT])
def test_whole_agrees_with_any_program(
    program: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verdict(program, "whole") == "agrees"


@pytest.mark.soak
@pytest.mark.parametrize("program", WRONG)
def test_split_is_refused_where_anything_is_another(
    program: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VerificationError, match="batches='whole'"):
        verdict(program, "split")


@pytest.mark.soak
@pytest.mark.parametrize("program", RIGHT)
def test_split_agrees_where_nothing_is_another(program: Callable[[], Any]) -> None:
    assert verdict(program, "split") == "agrees"


def until_the_clock() -> int:
    start, count = time.time(), 0
    while time.time() - start < 0.2:
        count += len(list(steps(loader())))
    return count


def seeded_by_the_clock() -> Any:
    torch.manual_seed(time.time_ns() % 2**31)
    return trained(loader())


@pytest.mark.soak
@pytest.mark.parametrize("program", [until_the_clock, seeded_by_the_clock])
def test_what_depends_on_the_clock_cannot_be_judged(program: Callable[[], Any]) -> None:
    with pytest.raises(VerificationError, match="Two runs of one process already differ"):
        verdict(program, "whole")
