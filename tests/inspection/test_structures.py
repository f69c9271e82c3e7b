"""``flatten`` and ``unflatten``."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lagom.inspection.structures import flatten, unflatten
from tests.ranks import alone, run_ranks


@dataclass
class Plain:
    one: Tensor
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    one: Tensor
    own: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", [self.one + 1])


@dataclass(slots=True)
class Slotted:
    one: Tensor
    number: int = 3


@dataclass
class Module(nn.Module):
    width: int

    def __hash__(self) -> int:
        return id(self)

    def __post_init__(self) -> None:
        super().__init__()


@dataclass
class Derived(Plain, ABC):
    last: float = 0.5


X = torch.arange(3.0)


@pytest.mark.parametrize(
    "value",
    [
        Plain(X),
        [Plain(X, {"inner": (Frozen(X), 7)}), X],
        Frozen(X),
        Slotted(X),
        Plain(X, [Slotted(X), None]),
    ],
)
def test_dataclasses_are_taken_apart_and_put_together(value: Any) -> None:
    leaves, structure = flatten(value)
    assert all(isinstance(leaf, (Tensor, int, float, type(None))) for leaf in leaves)
    found = unflatten([leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
    doubled, again = flatten(found)
    assert again == structure
    assert hash(again) == hash(structure)
    assert type(found) is type(value)
    assert found is not value
    for one, other in zip(doubled, leaves, strict=True):
        assert torch.equal(one, 2 * other) if isinstance(one, Tensor) else one == other


def test_attributes_that_are_no_fields_are_kept() -> None:
    value = Plain(X)
    value.later = "text"  # type: ignore[attr-defined]
    assert unflatten(*flatten(value)).later == "text"


def test_what_is_more_than_its_attributes_stays_a_leaf() -> None:
    twice = Plain(X)
    for value in (Module(3), Derived(X)):
        assert flatten(value)[0] == [value]
    assert flatten([twice, twice])[0] == [X, None, twice]
    twice.more = twice
    assert flatten(twice)[0] == [X, twice]


class Net(nn.Module):
    """Returns a dataclass, and gets one, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.one, self.way = nn.Linear(5, 2), way

    def forward(self, batch: Plain) -> Any:
        if self.way == "changes":
            batch.one = self.one(batch.one)
            return batch
        found = Plain(self.one(batch.one), Slotted(batch.more["mask"].sum(1)))
        if self.way == "returns":
            batch.more["mask"] += 0
            return found, batch
        if self.way == "twice":
            return [found, found]
        if self.way == "mixes":
            found.more = found.one.mean(0)
        return found


@pytest.mark.parametrize("way", ["", "changes", "returns", "twice", "mixes"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_forward_may_take_and_return_dataclasses(way: str, world_size: int) -> None:
    def program(session: Any) -> Any:
        torch.manual_seed(1)
        net = Net(way).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        numbers = []
        for _ in range(4):
            batch = Plain(torch.randn(7, 5, dtype=torch.float64), {"mask": torch.rand(7, 3, dtype=torch.float64)})
            found = net(batch)
            if way == "returns":
                assert found[1] is batch
            if way == "twice":
                assert found[0] is found[1]
            tensors = [one for one in flatten(found)[0] if isinstance(one, Tensor)]
            optimizer.zero_grad()
            loss = torch.stack([one.square().mean() for one in tensors]).sum()
            loss.backward()
            optimizer.step()
            numbers += [loss.detach(), batch.one.detach()]
        return [*numbers, *net.parameters()], sorted(text for text in session.said if "runs whole on every" in text)

    wanted, _ = alone(program)
    for found, said in run_ranks(world_size, program, batches="whole"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert bool(said) == bool(way), said
