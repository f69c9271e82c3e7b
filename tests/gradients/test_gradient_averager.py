"""``lagom.gradients.gradient_averager``: ranks that reach different leaves, or hold different ones."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import DivergenceError
from lagom.run_state.leaves import Leaves
from lagom.session.session import Session
from tests.ranks import run_ranks


@pytest.mark.soak  # tests/gradients/test_overlap.py has experts of one shape, the test below different sets
def test_experts_of_one_shape_are_never_mixed() -> None:
    def run(session: Session) -> Any:
        experts = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])
        router = nn.Linear(1, 1, bias=False)
        for parameter in (*experts.parameters(), *router.parameters()):
            nn.init.ones_(parameter)
        found = []
        for step in range(3):
            mine = (session.rank + step) % 3 if session.rank < 2 else 2
            experts.zero_grad()
            router.zero_grad()
            experts[mine](router(torch.full((1, 1), 1.0 + session.rank))).sum().backward()
            found.append(
                [None if p.grad is None else p.grad.item() for p in (*experts.parameters(), *router.parameters())]
            )
        return found

    expected = []
    for step in range(3):
        sums = [0.0] * 3
        for rank in range(3):
            sums[(rank + step) % 3 if rank < 2 else 2] += (1.0 + rank) / 3
        expected.append([total or None for total in sums] + [None, 2.0])
    for result in run_ranks(3, run):
        for found, wanted in zip(result, expected, strict=True):
            assert [value is None for value in found] == [value is None for value in wanted]
            assert [value or 0 for value in found] == pytest.approx([value or 0 for value in wanted])


def test_different_sets_work_with_large_half_complex_and_sparse_gradients() -> None:
    def run(session: Session) -> Any:
        large, half = nn.Linear(200, 200), nn.Linear(3, 3).bfloat16()
        table = nn.Embedding(5, 2, sparse=True)
        turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        loss = large(torch.ones(1, 200)).sum()
        if session.rank == 0:
            loss = loss + half(torch.ones(1, 3).bfloat16()).sum() + table(torch.tensor([1, 1])).sum()
        else:
            loss = loss + (turn * 2j).real.sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        assert table.weight.grad is not None
        assert turn.grad is not None
        return [
            p.grad.to_dense().clone() for p in (large.weight, half.weight, table.weight, turn) if p.grad is not None
        ]

    first, second = run_ranks(2, run)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    large, half, table, turn = first
    assert torch.equal(large, torch.full_like(large, 2.0))
    assert torch.equal(half, torch.ones_like(half))
    assert table.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [0, 0]]
    assert turn.tolist() == [-2j, -2j]


@pytest.mark.parametrize("hidden", [pytest.param(3, marks=pytest.mark.soak), 300])
def test_different_initial_values_are_an_error_on_every_rank(hidden: int) -> None:
    def run(session: Session) -> str:
        last = nn.Linear(1, hidden)
        model = nn.Sequential(nn.Linear(1, 1), last)
        own = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        nn.init.normal_(last.weight, generator=own)
        with pytest.raises(DivergenceError) as caught:
            model(torch.ones(1, 1)).sum().backward()
        return str(caught.value)

    for text in run_ranks(3, run):
        assert f"Sequential.1.weight of shape ({hidden}, 1)" in text
        assert "draw initial values from torch's" in text


def test_parameters_that_only_one_rank_makes_are_an_error() -> None:
    def run(session: Session) -> str:
        if session.rank == 0:
            extra = nn.Linear(7, 7)
            assert extra
        model = nn.Linear(1, 1)
        with pytest.raises(DivergenceError) as caught:
            model(torch.ones(1, 1)).sum().backward()
        return str(caught.value)

    assert all("same order, on every rank" in text for text in run_ranks(2, run))


def test_the_gradient_of_an_input_stays_the_ranks_own() -> None:
    def run(session: Session) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)
        data = torch.randn(7, 2)
        grads: list[Tensor] = []
        for (x,) in DataLoader(TensorDataset(data), batch_size=4):
            x.requires_grad_()
            for _ in range(2):
                loss = model(x).square().sum()
                loss.backward()
            assert x.grad is not None
            grads.append(x.grad / (2 * session.weight) - 2 * model(x) * model.weight)
        return [grad.abs().max().item() for grad in grads], model.weight.grad

    first, second = run_ranks(2, run)
    assert max(first[0] + second[0]) < 1e-5
    assert torch.equal(first[1], second[1])


def test_the_gradient_of_a_perturbation_stays_the_ranks_own_although_it_begins_as_zeros() -> None:
    def run(session: Session) -> Any:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        (x,) = next(iter(DataLoader(TensorDataset(torch.arange(8.0).view(4, 2)), batch_size=4)))
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            (model(x + delta).square() / 2).sum().backward()
        assert delta.grad is not None
        return torch.equal(delta.grad, 2 * x.sum(1, keepdim=True).expand(2, 2)), model.weight.grad

    first, second = run_ranks(2, run)
    assert (first[0], second[0]) == (True, True)
    assert torch.equal(first[1], second[1])


@pytest.mark.soak  # tests/gradients/test_replicas.py has more than are remembered
def test_many_layouts_are_forgotten_and_found_again() -> None:
    def run(session: Session) -> Any:
        leaves = [nn.Parameter(torch.ones(1)) for _ in range(9)]
        assert session.backwards.gradient_averager is not None
        for mask in range(1, 200):
            sum(
                (leaf * (session.rank + 1) for i, leaf in enumerate(leaves) if mask >> i & 1), torch.zeros(1)
            ).backward()
        return [leaf.grad.item() for leaf in leaves if leaf.grad is not None]

    expected = [1.5 * sum(mask >> i & 1 for mask in range(1, 200)) for i in range(8)]
    assert run_ranks(2, run) == [expected] * 2


def test_leaves_forget_the_dead_and_never_reuse_a_number() -> None:
    leaves = Leaves()
    numbers = set()
    for _ in range(100):
        numbers.add(leaves.number(torch.zeros(1, requires_grad=True)))
    gc.collect()
    assert len(numbers) == 100
    assert not leaves._by_id
    kept = torch.zeros(1, requires_grad=True)
    assert leaves.number(kept) == leaves.number(kept) == 100
    assert leaves.tensor(100) is kept
    assert leaves.tensor(99) is None
