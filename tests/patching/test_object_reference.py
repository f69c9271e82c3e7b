"""Programs swap tensors to which lagom has weak references, as in one process; their own references still count."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.config.torch_distributed import Batches
from lagom.session.session import Session
from tests.ranks import check_against_one_process
from tests.sources import ROOT


@contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()


def data() -> DataLoader[Any]:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in data():
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def swap_between_epochs(_: Session) -> list[Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    first = {name: value.clone() for name, value in net.state_dict().items()}
    with swapping():
        train(net, optimizer)
        net.load_state_dict(first)
        train(net, optimizer)
        net.float().double()
        train(net, optimizer)
        optimizer.zero_grad()
        left, right = net[0].bias, nn.Parameter(torch.ones(8, dtype=torch.float64))  # type: ignore[index]
        torch.utils.swap_tensors(left, right)
        train(net, optimizer)
    return [*net.state_dict().values(), right.detach()]


@pytest.mark.parametrize(
    ("batches", "zero_lvl"), [("whole", 0), ("split", 0), ("split", 1), ("split", 2), ("split", 3)]
)
def test_a_model_whose_tensors_are_swapped_trains_on_as_in_one_process(batches: Batches, zero_lvl: int) -> None:
    check_against_one_process(swap_between_epochs, 2, batches=batches, zero_lvl=zero_lvl)


@pytest.mark.soak
@pytest.mark.parametrize("batches", ["whole", "split"])
def test_a_model_whose_tensors_are_swapped_trains_on_three_ranks(batches: Batches) -> None:
    check_against_one_process(swap_between_epochs, 3, batches=batches)


def swap_data(_: Session) -> list[Any]:
    """Swap tensors of batches, a tensor that is trained though it is no Parameter, and one with a reference."""
    weight, found = torch.ones(3, 1, dtype=torch.float64, requires_grad=True), []
    for x, y in data():
        other = torch.zeros_like(x)
        torch.utils.swap_tensors(x, other)
        found.append((x, other))
        (other @ weight - y).square().mean().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad  # type: ignore[operator]
        weight.grad = None
    fresh = torch.full((3, 1), 2.0, dtype=torch.float64, requires_grad=True)
    torch.utils.swap_tensors(weight, fresh)
    reference = weakref.ref(weight)
    with pytest.raises(RuntimeError, match="t1 because it has weakref"):
        torch.utils.swap_tensors(weight, fresh)
    return [found, weight, fresh, reference() is weight]


def test_tensors_of_batches_are_swapped_and_those_with_a_reference_of_the_program_are_not() -> None:
    check_against_one_process(swap_data, 2, batches="whole")


def test_lagom_has_no_dictionary_with_references_that_a_swap_sees() -> None:
    for path in sorted((ROOT / "lagom").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "KeyDictionary(" in text else ():
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in ("WeakIdKeyDictionary", "WeakTensorKeyDictionary"):
                assert isinstance(node, ast.Call)
                keys = [keyword.arg for keyword in node.keywords]
                assert "ref_type" in keys, f"{path}:{node.lineno}: use tensor_dictionary() or give a ref_type"
