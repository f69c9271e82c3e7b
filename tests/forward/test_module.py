"""``lagom.forward.module``: preparation of a forward."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.config.torch_distributed import Batches
from lagom.run_state.device_moves import InputFollower, move_to_device
from lagom.session.session import Session
from tests.ranks import check_against_one_process, run_ranks


def test_dropout_differs_between_ranks_and_initial_values_agree() -> None:
    def run(session: Session) -> Any:
        first = nn.LazyLinear(50)
        model = nn.Sequential(first, nn.Dropout())
        masks = []
        for (x,) in DataLoader(TensorDataset(torch.ones(12, 3)), batch_size=4):
            out = model(x)
            out.sum().backward()
            masks.append((out == 0).tolist())
        model.eval()
        late = nn.Linear(3, 3)
        return masks, first.weight.detach(), late.weight.detach(), torch.rand(1).item()

    first, second = run_ranks(2, run)
    assert first[0][1] != second[0][1]
    assert first[0][1] != first[0][2]
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    assert first[3] == second[3]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_repeats_its_random_numbers(use_reentrant: bool) -> None:
    def run(_: Session) -> Any:
        model, dropout = nn.Linear(4, 4), nn.Dropout()
        found = []
        for (x,) in DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4):
            out = checkpoint(dropout, model(x), use_reentrant=use_reentrant)
            (mask,) = (out != 0).unbind(0) if len(out) == 1 else [out != 0]
            model.zero_grad()
            out.sum().backward()
            found.append((2.0 * mask.sum(0), model.bias.grad))
        return [(a, b) for a, b in found]

    results = run_ranks(2, run)
    for step in range(3):
        mean = (results[0][step][0] + results[1][step][0]) / 2
        assert torch.equal(results[0][step][1], mean)


def test_modules_with_their_own_equality_are_tracked() -> None:
    def run(session: Session) -> int:
        class Equal(nn.Linear):
            def __eq__(self, other: object) -> bool:
                return True

            __hash__ = None  # type: ignore[assignment]

        models = [Equal(1, 1), Equal(1, 1)]
        for (x,) in DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2):
            sum(model(x).sum() for model in models).backward()
        return len(session.tensors.modules)

    assert run_ranks(2, run) == [2, 2]


class Proxy(nn.Module):
    """Passes unknown attributes on to the module inside; two of its bases construct it."""

    def __init__(self, inner: nn.Module) -> None:
        nn.Module.__init__(self)
        nn.Module.__init__(self)
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("batches", [pytest.param("split", marks=pytest.mark.soak), "whole"])
def test_modules_that_pass_on_their_attributes_train(batches: Batches) -> None:
    def run(_: Session) -> Any:
        model = Proxy(Proxy(nn.Sequential(nn.Linear(3, 4), Proxy(nn.Linear(4, 2))))).double()
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3)), 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    check_against_one_process(run, batches=batches)


def test_moved_keeps_containers_and_other_objects() -> None:
    class Mine(list[Any]):
        pass

    point = namedtuple("point", "x y")  # as programs write it
    other, mine = object(), Mine([torch.zeros(1)])
    data = {"a": [torch.zeros(1), 3], "b": (point(torch.zeros(2), "text"), other), "c": mine, 4: None}
    there = move_to_device(data, torch.device("meta"))
    assert list(there) == ["a", "b", "c", 4]
    assert there["a"][0].device.type == there["b"][0].x.device.type == "meta"
    assert type(there["b"][0]) is point
    assert there["a"][1] == 3
    assert there["b"][1] is other
    assert there["c"] is mine
    assert data["a"][0].device.type == "cpu"  # type: ignore[index, union-attr]


def test_a_module_follows_its_input_and_keeps_its_parameters() -> None:
    meta = torch.device("meta")
    module = nn.Linear(2, 2)
    weight, follower = module.weight, InputFollower(meta)
    follower.follow(module, (torch.zeros(1),), {})
    assert module.weight.device.type == "cpu"
    follower.follow(nn.ReLU(), (torch.zeros(1, device=meta),), {})
    for _ in range(2):
        follower.follow(module, (), {"x": [{"y": torch.zeros(1, device=meta)}]})
        assert module.weight.device.type == "meta"
    del weight
