"""``lagom.session.patched``: all patches are entered together and undone exactly."""

from __future__ import annotations

import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, dataloader

from lagom.exchange.group import Group
from lagom.patching.replace import replaced
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import run_ranks, session_alone


class Downloadable(Dataset[int]):
    def __init__(self, download: bool = False) -> None:
        pass


OWNERS: list[Any] = [
    torch,
    torch.serialization,
    torch.autograd,
    torch.autocast,
    torch.optim.Optimizer,
    torch.optim.SGD,
    torch.amp.GradScaler,
    torch.Tensor,
    nn.Module,
    nn.utils,
    nn.utils.clip_grad,
    nn.functional,
    nn.Parameter,
    nn.parameter.UninitializedParameter,
    DataLoader,
    Dataset,
    Downloadable,
    dataloader._BaseDataLoaderIter,
    dataloader._SingleProcessDataLoaderIter,
    dataloader._MultiProcessingDataLoaderIter,
    dataloader._DatasetKind,
    urllib.request,
]
IGNORED = {"__slotnames__", "__abstractmethods__", "__doc__", "__annotations__"}


def names() -> list[dict[str, int]]:
    return [{key: id(value) for key, value in vars(owner).items() if key not in IGNORED} for owner in OWNERS]


def test_replaced_restores_own_and_inherited_names() -> None:
    class Base:
        @staticmethod
        def name() -> str:
            return "base"

    class Derived(Base):
        pass

    own = vars(Base)["name"]

    def raises() -> None:
        with replaced(Derived, "name", None), replaced(Base, "name", 1):
            assert vars(Base)["name"] == 1
            raise KeyError

    with pytest.raises(KeyError):
        raises()
    assert "name" not in vars(Derived)
    assert vars(Base)["name"] is own


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"mixed_precision": "fp16"}),
        (2, {"zero_lvl": 2, "mixed_precision": "bf16"}),
        (2, {"zero_lvl": 3}),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in ((1, {}), (2, {}), (2, {"zero_lvl": 1}))),
    ],
)
def test_all_patches_are_undone_after_an_exception(world_size: int, options: dict[str, Any]) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # torch wraps a class's step when its first optimizer is made
    before = names()

    def fail(session: Session) -> None:
        with patched(session):
            assert names() != before
            for (x,) in DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2):
                model = nn.Linear(1, 1)
                model(x).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                break
            raise ZeroDivisionError

    def run(session: Session) -> bool:
        with pytest.raises(ZeroDivisionError):
            fail(session)
        return names() == before

    assert run_ranks(world_size, run, patches=False, **options) == [True] * world_size


def test_one_rank_in_this_process_changes_nothing(tmp_path: Path) -> None:
    before = names()
    session = session_alone(tmp_path)
    with patched(session):
        if session.spans is None:  # a timeline also records backwards of one rank
            assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
        assert next(iter(DataLoader(TensorDataset(torch.arange(3)), batch_size=3)))[0].tolist() == [0, 1, 2]
    assert session.progress.samples_trained == 3
    assert names() == before


def test_a_process_forked_from_a_rank_is_left_alone() -> None:
    import os

    def run(session: Session) -> bool:
        assert isinstance(session.group, Group)
        pid = os.fork()
        if pid == 0:
            model = nn.Linear(1, 1)
            for (x,) in DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=4):
                model(x).sum().backward()
                os._exit(0 if len(x) == 4 else 1)
        return os.waitpid(pid, 0)[1] == 0

    assert run_ranks(2, run) == [True, True]


def test_contexts_of_extensions_end_before_the_patches(tmp_path: Path) -> None:
    before, session = names(), session_alone(tmp_path)
    is_patched: list[bool] = []

    def add(stack: ExitStack) -> None:
        stack.callback(lambda: is_patched.append(names() != before))

    session.events.patched.subscribe(add)
    with patched(session):
        assert is_patched == []
    assert is_patched == [True]
    assert names() == before
