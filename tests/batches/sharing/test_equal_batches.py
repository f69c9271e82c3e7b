"""``lagom.batches.sharing.equal_batches``: batches are equal if nothing tells them apart."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lagom.batches.sharing.equal_batches import BatchComparison

Pair = namedtuple("Pair", ["first", "second"])


class Kind(enum.Enum):
    ONE, TWO = range(2)


@dataclass
class Batch:
    numbers: Any
    name: str = "name"


def are_equal(mine: object, other: object) -> bool:
    return BatchComparison().match(mine, other)


class Slotted:
    __slots__ = ("held",)


def views() -> list[torch.Tensor]:
    numbers = torch.arange(6.0)
    return [numbers, numbers[2:], numbers.view(2, 3).t()]


def cycle() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6).view(2, 3),
        lambda: torch.full((2,), float("nan")),
        lambda: torch.zeros(0, 3),
        lambda: torch.ones(2, requires_grad=True),
        lambda: (1, 2.5, float("nan"), 1j, True, None, "text", b"bytes", torch.float16, Kind.ONE, Batch),
        lambda: Pair([np.arange(3), np.float32(2)], {"key": Batch(torch.ones(2))}),
        lambda: OrderedDict(a=UserDict(b=[1])),
        views,
        cycle,
    ],
)
def test_copies_are_equal(make: Callable[[], Any]) -> None:
    assert are_equal(make(), make())
    assert are_equal(make(), copy.deepcopy(make()))


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.ones(2, 2), torch.ones(2, 2).t().clone().t()[:, :1].expand(2, 2)),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2))),
        (1, 1.0),
        (0.0, -0.0),
        (True, 1),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Batch(1), Batch(2)),
        (Kind.ONE, Kind.TWO),
        (np.arange(3), np.arange(3)[::-1]),
        (np.arange(3), np.arange(3.0)),
        (views(), [view.clone() for view in views()]),
        ([[]] * 2, [[], []]),
    ],
)
def test_unlike_batches_are_not_equal(mine: Any, other: Any) -> None:
    assert not are_equal(mine, other)
    assert not are_equal(other, mine)


@pytest.mark.parametrize(
    "make",
    [
        Slotted,
        lambda: defaultdict(list, a=[1]),
        lambda: {1, 2},
        lambda: np.array([None, "text"]),
        lambda: iter([1]),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.ones(100_000)[:3],
    ],
)
def test_objects_of_unknown_kinds_are_not_equal(make: Callable[[], Any]) -> None:
    assert not are_equal(make(), make())
