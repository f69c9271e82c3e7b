"""Tensors that resemble other tensors: weights shaped like samples, other batches shaped like this one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, check_against_one_process, run_ranks


def data(num: int, width: int) -> TensorDataset:
    x = torch.randn(num, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def with_square_weights(forward: Callable[[Tensor, list[Tensor]], Tensor], share: int, world_size: int) -> Any:
    """Train weights that are no Parameters and have the shape of a rank's part of a batch."""

    def program(session: Session) -> list[Tensor]:
        torch.manual_seed(1)
        weights = [torch.randn(share, share, dtype=torch.float64).requires_grad_() for _ in range(2)]
        for _ in range(2):
            for x, y in DataLoader(data(4 * share * world_size, share), share * world_size, shuffle=True):
                F.mse_loss(forward(x, weights).sum(1, keepdim=True), y).backward()
                with torch.no_grad():
                    for weight in weights:
                        assert weight.grad is not None
                        weight -= 0.02 * weight.grad
                        weight.grad = None
        return weights

    return program


FORWARDS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "products": lambda x, weights: (x @ weights[0]).tanh() @ weights[1],
    "transposed": lambda x, weights: F.linear(F.linear(x, weights[0]).tanh(), weights[1], torch.ones(1).double()),
    "batched": lambda x, weights: ((x[None] @ weights[0][None]).tanh() @ weights[1][None])[0],
    "copied": lambda x, weights: (x @ weights[0].clone()).tanh() @ weights[1].T.contiguous(),
}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_weights_of_the_shape_of_a_share_are_trained_as_on_one_machine(world_size: int) -> None:
    programs = {name: with_square_weights(forward, 4, world_size) for name, forward in FORWARDS.items()}
    check_against_one_process(lambda session: {name: run(session) for name, run in programs.items()}, world_size)


def test_what_was_taken_for_a_perturbation_is_not_trained_on() -> None:
    """An elementwise weight of such a shape looks like a perturbation, until the next batch comes."""
    program = with_square_weights(lambda x, weights: x * weights[0] + weights[1], 4, 2)
    with pytest.raises(RankFailedError, match=r"shape \(4, 4\).*make it a torch.nn.Parameter"):
        run_ranks(2, program)


def test_a_tensor_that_multiplies_a_parameter_is_an_error() -> None:
    """The tensor may be a weight, or samples in columns."""

    def program(_: Session) -> None:
        model = nn.Parameter(torch.ones(4, 4).double())
        for x, _y in DataLoader(data(32, 4), 8):
            (model @ (x + 0).requires_grad_().T).sum().backward()

    with pytest.raises(RankFailedError, match=r"shape \(4, 4\).*multiplies a Parameter.*make it a torch.nn.Parameter"):
        run_ranks(2, program)


def test_a_batchs_own_tensor_is_data_however_it_is_used() -> None:
    """Samples in columns, in two epochs over the same batches."""

    def program(_: Session) -> Any:
        torch.manual_seed(1)
        model = nn.Parameter(torch.randn(1, 4).double())
        batches = list(DataLoader(data(32, 4), 8))
        for x, y in 2 * batches:
            x.requires_grad_()
            F.mse_loss((model @ x.T).T, y).backward()
            assert x.grad is not None
            F.mse_loss((model @ (x.detach() + 0.1 * x.grad.sign()).T).T, y).backward()
            x.grad = None
        return model.grad

    wanted = alone(program)
    for found in run_ranks(2, program):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


class Texts(logging.Handler):
    """Keeps the texts of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_a_tensor_that_is_taken_for_data_is_named() -> None:
    def program(_: Session) -> list[str]:
        log = Texts()
        logging.getLogger("lagom").addHandler(log)
        for x, _y in DataLoader(data(8, 4), 8):
            weight = torch.ones_like(x, requires_grad=True)
            (x * weight).sum().backward()
        return [text for text in log.texts if "a tensor of shape (4, 4)" in text]

    for (said,) in run_ranks(2, program):
        assert "a weight must be a torch.nn.Parameter" in said


def test_a_perturbation_of_each_batch_is_the_ranks_own() -> None:
    def program(_: Session) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in DataLoader(data(32, 4), 8):
            delta = torch.zeros_like(x, requires_grad=True)
            F.mse_loss(model(x + delta), y).backward()
            assert delta.grad is not None
            optimizer.zero_grad()
            F.mse_loss(model(x + 0.1 * delta.grad.sign()), y).backward()
            optimizer.step()
        return [tensor.detach().clone() for tensor in model.parameters()]

    check_against_one_process(program)


def cached(loader: DataLoader[Any]) -> list[Any]:
    return list(loader)


def one_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current


@pytest.mark.parametrize(
    ("num", "taken"),
    [
        *((53, cached), (48, one_ahead)),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in ((53, one_ahead), (48, cached))),
    ],
)
def test_batches_that_were_taken_earlier_count_right_or_not_at_all(taken: Callable[[Any], Any], num: int) -> None:
    """The loop changes the batches, so that the model is not called with a batch's own tensors."""

    def program(_: Session) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(4, 1).double()
        for x, y in taken(DataLoader(data(num, 4), 8, shuffle=True)):
            F.mse_loss(model((x - 0.1) / 2), y).backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    if num % 8:
        with pytest.raises(RankFailedError, match="made of no batch lagom knows"):
            run_ranks(2, program)
        return
    check_against_one_process(program)


def images_one_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    for x, y in one_ahead(loader):
        yield ((x.view(-1, 1, 2, 2) - 0.1) / 2).contiguous(), y


@pytest.mark.parametrize("num", [33, 40])
def test_a_channel_is_not_taken_for_a_batch_of_one_sample(num: int) -> None:
    """Grey images, and a tail of one sample for a rank: an earlier batch has other rows than the tail."""

    def program(_: Session) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).double()
        for x, y in images_one_ahead(DataLoader(data(num, 4), 8, shuffle=True)):
            F.mse_loss(model(x), y).backward()
        return [parameter.grad for parameter in model.parameters()]

    if num % 8:
        with pytest.raises(RankFailedError, match="made of no batch lagom knows"):
            run_ranks(2, program)
        return
    check_against_one_process(program)


def without_the_dark(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    kept = [sample for sample in samples if sample[0][0] >= -1.5]
    return [torch.stack([sample[i] for sample in kept]) for i in range(2)]


def time_first(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack([sample[0] for sample in samples]).T, torch.stack([sample[1] for sample in samples])]


@pytest.mark.parametrize(("collate_fn", "atol"), [(without_the_dark, 0.1), (time_first, 1e-12)])
def test_batches_whose_rows_are_not_their_samples_may_be_changed(collate_fn: Any, atol: float) -> None:
    """Leaving samples out, or putting time first, can give as many rows as this rank has samples of another batch."""

    def program(_: Session) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(3, 1).double()
        seen = set()
        for _epoch in range(2):
            for x, y in DataLoader(data(29, 3), 8, collate_fn=collate_fn):
                seen.add(len(x))
                F.mse_loss(Turned(model)(x / 255) if collate_fn is time_first else model(x / 255), y).backward()
        return seen, [parameter.grad for parameter in model.parameters()]

    (_, wanted), runs = alone(program), run_ranks(2, program)
    assert 3 in set.union(*(seen for seen, _ in runs))  # 3 of 4 samples: as many as a rank has of the tail of 5
    for _, found in runs:
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


class Turned(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x.T)
