"""Gradients that nobody looks at between backwards are averaged once, and are those of one machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import LagomError
from lagom.gradients import overlap
from lagom.gradients.tensor_averager import TensorAverager
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, check_against_one_process, run_ranks


def _network(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)).double()


def _batches(num: int, size: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    x = torch.linspace(-1, 1, num * size * 3, dtype=torch.float64).reshape(-1, 3)
    yield from DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=size, shuffle=True)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class _Count:
    """How many reductions there were, in each cycle of a program."""

    def __init__(self) -> None:
        self.each: list[int] = [0]
        original = TensorAverager.average

        def average(averager: TensorAverager, *args: Any, **options: Any) -> bool:
            self.each[-1] += 1
            return original(averager, *args, **options)

        TensorAverager.average = average  # type: ignore[method-assign,assignment]  # in a forked process

    def next(self) -> None:
        self.each.append(0)


def _plain(model: nn.Module, every: int, num_cycles: int, last: int | None = None) -> list[int]:
    """Accumulate over ``every`` batches; over ``last`` in the last cycle."""
    count = _Count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = [every] * (num_cycles - 1) + [last or every]
    batches = _batches(sum(sizes))
    for size in sizes:
        for _ in range(size):
            (_loss(model, next(batches)) / size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        count.next()
    return count.each[:-1]


@pytest.mark.parametrize(
    ("every", "world_size"),
    [(2, 2), *(pytest.param(*other, marks=pytest.mark.soak) for other in ((4, 3), (2, 3), (4, 2)))],
)
def test_one_reduction_for_each_step(every: int, world_size: int) -> None:
    def run(_session: Session) -> Any:
        torch.manual_seed(1)
        model = _network()
        counts = _plain(model, every, 8, last=every - 1)
        return [p.detach() for p in model.parameters()], counts

    expected, _ = alone(run)
    for found, counts in run_ranks(world_size, run):
        assert counts == [every] * 3 + [1] * 5
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_uneven_batches_have_their_weights() -> None:
    def run(_session: Session) -> Any:
        torch.manual_seed(1)
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count = _Count()
        for _ in range(3):
            for i, batch in enumerate(_batches(8, size=5), 1):
                _loss(model, batch).backward()
                if i % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    count.next()
        return [p.detach() for p in model.parameters()], count.each[-2]

    expected, _ = alone(run)
    for found, last in run_ranks(2, run):
        assert last == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def _reads_between(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for i, batch in enumerate(_batches(3)):
        _loss(model, batch).backward()
        if i == 1 and cycle in {5, 6}:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad, alpha=0.01)


def _throws_away(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for i, batch in enumerate(_batches(3)):
        _loss(model, batch).backward()
        if i == 1 and cycle == 6:
            for parameter in model.parameters():
                parameter.grad = None
        if i == 1 and cycle == 7:
            next(model.parameters()).grad = None
        if i == 1 and cycle == 8:
            del next(model.parameters()).grad


def _sets(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for i, batch in enumerate(_batches(3)):
        _loss(model, batch).backward()
        if i == 1 and cycle == 6:
            first = next(model.parameters())
            first.grad = torch.ones_like(first)


def _hooks_midway(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    handle = None
    for i, batch in enumerate(_batches(3)):
        if i == 1 and cycle == 6:
            handle = next(model.parameters()).register_hook(torch.sign)
        _loss(model, batch).backward()
    if handle is not None:
        handle.remove()


def _changes(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for batch in _batches([3, 3, 3, 3, 3, 3, 5, 5, 5, 2, 2, 1, 4][cycle]):
        _loss(model, batch).backward()


def _keeps_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for batch in _batches(3):
        _loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _second_order(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for i, batch in enumerate(_batches(3)):
        loss = _loss(model, batch)
        if i == 1 and cycle > 6:
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + sum(g.square().sum() for g in grads)
        loss.backward()


def _reentrant(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for batch in _batches(3):
        if cycle > 6:
            x = batch[0].clone().requires_grad_()
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
            nn.functional.mse_loss(out, batch[1]).backward()
        else:
            _loss(model, batch).backward()


def _fails_once(model: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> None:
    for i, batch in enumerate(_batches(3)):
        if i and cycle == 6:
            broken = _loss(model, batch)
            broken.register_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                broken.backward()
        _loss(model, batch).backward()


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError


PROGRAMS = (
    _reads_between,
    _throws_away,
    _sets,
    _hooks_midway,
    _changes,
    _keeps_zeros,
    _second_order,
    _reentrant,
    _fails_once,
)
AS_OTHERS = (_sets, _hooks_midway, _keeps_zeros, _reentrant)
"""These run with ``-m soak``.

By default test_cached_backward.py has gradients that are set and hooks that come late, test_overlap.py zeros that are
kept, and the test below a checkpoint.
"""


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "accumulate",
    [
        pytest.param(one, id=one.__name__.strip("_"), marks=pytest.mark.soak if one in AS_OTHERS else ())
        for one in PROGRAMS
    ],
)
def test_a_program_that_does_otherwise_is_right(accumulate: Callable[..., None], world_size: int) -> None:
    def run(_session: Session) -> Any:
        torch.manual_seed(1)
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for cycle in range(12):
            accumulate(model, optimizer, cycle)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    check_against_one_process(run, world_size, atol=1e-13)


def test_a_weight_that_is_no_parameter_inside_a_checkpoint() -> None:
    """The graph of the loss does not contain it, so it is seen only while the backward runs."""

    def run(_session: Session) -> list[Tensor]:
        torch.manual_seed(1)
        model = _network()
        scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.05)
        for _ in range(8):
            for x, y in _batches(3):
                out = torch.utils.checkpoint.checkpoint(lambda one: one * scale, model(x), use_reentrant=True)
                nn.functional.mse_loss(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in (*model.parameters(), scale)]

    check_against_one_process(run, atol=1e-13)


def test_ranks_that_reach_different_layers() -> None:
    def run(session: Session) -> Any:
        torch.manual_seed(1)
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        parts = (0, 1) if session.group is None else (session.rank,)
        count = _Count()
        for cycle in range(8):
            for i in range(3):
                x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
                losses = [_of_expert(model, x, part, cycle + i) for part in parts]
                torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            count.next()
        return [p.detach() for p in model.parameters()], count.each

    expected, _ = alone(run)
    for found, counts in run_ranks(2, run):
        assert counts[5] <= 2  # the second when they reached different ones in all three
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def _of_expert(model: nn.Module, x: Tensor, part: int, turn: int) -> Tensor:
    hidden = model[1](model[0](x)) if (part + turn) % 3 else x.repeat(1, 2)[:, :5]  # type: ignore[index]
    loss: Tensor = (model[2:](hidden) - part).square().mean()  # type: ignore[index]
    return loss


def test_sparse_gradients() -> None:
    def run(_session: Session) -> Any:
        torch.manual_seed(1)
        table = nn.Embedding(7, 2, sparse=True).double()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.05)
        words = torch.arange(24) * 5 % 7
        count = _Count()
        for _ in range(8):
            for (batch,) in DataLoader(TensorDataset(words), batch_size=8):
                table(batch).sin().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            count.next()
        return table.weight.detach(), count.each[6]

    expected, _ = alone(run)
    for found, last in run_ranks(2, run):
        assert last == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.soak  # tests/gradients/test_overlap.py accumulates large gradients
def test_large_gradients_travel_during_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)

    def run(session: Session) -> Any:
        torch.manual_seed(1)
        model = _network(256)
        began: list[bool] = []
        if (averager := session.backwards.gradient_averager) is not None:
            end = averager.overlap.end

            def ends() -> Any:
                found = end()
                began.append(found is not None)
                return found

            averager.overlap.end = ends  # type: ignore[method-assign]
        _plain(model, 3, 9)
        return [p.detach() for p in model.parameters()], began

    expected, _ = alone(run)
    for found, began in run_ranks(2, run):
        assert began[-4:] == [True] * 4
        assert len(began) == 3 * 3 + 6
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("batches", ["whole", "per_rank"])
def test_whole_and_per_rank(batches: Any) -> None:
    def run(_session: Session) -> Any:
        torch.manual_seed(1)
        model = _network()
        count = _Count()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            for batch in _batches(2):
                _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            count.next()
        return [p.detach() for p in model.parameters()], count.each[-2]

    expected, _ = alone(run)
    for found, last in run_ranks(2, run, batches=batches):
        if batches == "whole":
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        assert last == 1


def test_another_thread_is_told() -> None:
    def run(_session: Session) -> str:
        model = _network()
        said: list[str] = []

        def look() -> None:
            try:
                assert next(model.parameters()).grad is not None
            except LagomError as error:
                said.append(str(error))

        _plain(model, 2, 6)
        for batch in _batches(1):
            _loss(model, batch).backward()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return said[0]

    for said in run_ranks(2, run):
        assert "in another thread" in said


def test_two_networks_that_train_each_other() -> None:
    def run(_session: Session) -> Any:
        torch.manual_seed(1)
        first, second = _network(), _network()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (first, second)]
        batches = _batches(40)
        for _ in range(10):
            optimizers[0].zero_grad()
            _loss(first, next(batches)).backward()
            _loss(first, next(batches)).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            x, _ = next(batches)
            first(second(x) * x).square().mean().backward()
            optimizers[1].step()
        return [p.detach() for p in (*first.parameters(), *second.parameters())]

    check_against_one_process(run, atol=1e-13)


def test_gradients_are_torchs_again_afterwards() -> None:
    def run(_session: Session) -> bool:
        _plain(_network(), 2, 5)
        return "grad" in vars(Tensor)

    assert run_ranks(2, run) == [True, True]
    assert "grad" not in vars(Tensor)


def test_a_program_that_never_accumulates_is_not_watched() -> None:
    def run(_session: Session) -> bool:
        _plain(_network(), 1, 5)
        return "grad" in vars(Tensor)

    assert run_ranks(2, run) == [False, False]


def test_a_program_that_always_looks_is_left_alone() -> None:
    def run(_session: Session) -> bool:
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in _batches(30):
            optimizer.zero_grad(set_to_none=False)
            _loss(model, batch).backward()
            optimizer.step()
        return "grad" in vars(Tensor)

    assert run_ranks(2, run) == [False, False]


@pytest.mark.soak
@pytest.mark.parametrize("first", [0, 1, 6])  # 6 has the first step as well
def test_compiled_code_gets_averages(first: int) -> None:
    def run(_session: Session) -> Any:
        torch.manual_seed(1)
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = _batches(30)

        @torch.compile(backend="eager")
        def apply() -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)

        for cycle in range(10):
            for _ in range(3 if cycle else 1):
                _loss(model, next(batches)).backward()
            if cycle < first:
                optimizer.step()
            else:
                apply()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    check_against_one_process(run, atol=1e-13)


def test_a_rank_that_looks_alone_while_it_is_learnt_does_no_harm() -> None:
    def run(session: Session) -> Any:
        torch.manual_seed(1)
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            for batch in _batches(3):
                _loss(model, batch).backward()
                if session.rank == 1:
                    assert next(model.parameters()).grad is not None
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    check_against_one_process(run, atol=1e-13)


def test_a_rank_that_looks_alone_later_is_told() -> None:
    def run(session: Session) -> None:
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for cycle in range(8):
            for i, batch in enumerate(_batches(3)):
                _loss(model, batch).backward()
                if session.rank == 1 and cycle == 6 and i == 1:
                    next(model.parameters()).grad  # noqa: B018  (it is read)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RankFailedError, match=r"DivergenceError.*different points.*the 2\. one since gradients"):
        run_ranks(2, run)
