"""``lagom.batches.evaluation_passes``: with ``batches="split"`` a pass over a loader is judged by its use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import LagomError
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, check_against_one_process, run_ranks

Loader = DataLoader[Any]


def data(num: int = 26) -> TensorDataset:
    x = torch.randn(num, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
    for x, y in loader:
        train_step(model, optimizer, x, y)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    model.train()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def predict_step(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(x)
    return found


class Engine:
    """Draws batches by hand, as frameworks do, and leaves the mode to the step."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self.step = step
        self.seen = 0

    def run(self, loader: Loader) -> int:
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return self.seen
            self.step(batch)
            self.seen += len(batch[0])


def with_the_mode_inside(model: nn.Module, loader: Loader) -> Any:
    return torch.cat([predict_step(model, x) for x, _ in loader])


def with_no_mode_at_all(model: nn.Module, loader: Loader) -> Any:
    return sum(((model(x) > 0) == (y > 0)).sum().item() for x, y in loader) / 26


def by_an_engine(model: nn.Module, loader: Loader) -> Any:
    return Engine(lambda batch: predict_step(model, batch[0])).run(loader)


def features_for_another_library(model: nn.Module, loader: Loader) -> Any:
    features, targets = [], []
    for x, y in loader:
        features.append(model[:2](x).detach().numpy())  # type: ignore[index]
        targets.append(y)
    return len(features), len(torch.cat(targets))


def of_some_batches(model: nn.Module, loader: Loader) -> Any:
    errors = []
    for i, (x, y) in enumerate(loader):
        if i == 2:
            break
        errors.append(F.mse_loss(predict_step(model, x), y).item())
    next(iter(loader))
    return errors


def of_one_batch(model: nn.Module, loader: Loader) -> Any:
    for x, y in DataLoader(loader.dataset, batch_size=26):
        error = F.mse_loss(model(x), y).item()
        del x
    return error


EVALUATIONS = (
    with_the_mode_inside,
    with_no_mode_at_all,
    by_an_engine,
    features_for_another_library,
    of_some_batches,
    of_one_batch,
)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_an_evaluation_that_was_dealt_out_is_an_error(world_size: int) -> None:
    def program(session: Session) -> list[str]:
        told = []
        for evaluate in EVALUATIONS:
            model, optimizer = made()
            loader = DataLoader(data(), batch_size=8)
            fit(model, optimizer, loader)
            with pytest.raises(
                LagomError, match=r"test_evaluation_passes.py:\d+ called a model and ran no backward"
            ) as found:
                evaluate(model, loader)
            told.append(str(found.value))
        return told

    for told in run_ranks(world_size, program):
        assert all("model.eval()" in text and "torch.no_grad()" in text and "batches='whole'" in text for text in told)


# tests/programs evaluates on whole batches by default.
@pytest.mark.parametrize(
    "options",
    [pytest.param({"batches": "whole"}, marks=pytest.mark.soak), {"evaluation": "gathered", "first": True}],
)
def test_such_an_evaluation_is_right_on_whole_batches_and_when_its_mode_is_set_before(options: dict[str, Any]) -> None:
    first = options.pop("first", False)

    def program(session: Session) -> list[Any]:
        found = []
        for evaluate in EVALUATIONS:
            model, optimizer = made()
            loader = DataLoader(data(), batch_size=8)
            fit(model, optimizer, loader)
            with torch.set_grad_enabled(not first):
                model.train(not first)
                found.append(evaluate(model, loader))
        return found

    check_against_one_process(program, **options)


def test_outputs_that_are_kept_and_never_trained_on_are_an_error_at_the_end() -> None:
    def program(_: Session) -> Tensor:
        model, optimizer = made()
        loader = DataLoader(data(), batch_size=8)
        outputs = torch.cat([model(x) for x, _ in loader])
        fit(model, optimizer, loader)
        return outputs.detach()

    with pytest.raises(RankFailedError, match="called a model and ran no backward"):
        run_ranks(2, program)


def losses_of_an_epoch_added_up(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
    total = torch.stack([F.mse_loss(model(x), y) for x, y in loader]).sum()
    total = total + torch.stack([F.l1_loss(model(x / 2), y) for x, y in DataLoader(loader.dataset, batch_size=6)]).sum()
    total.backward()
    optimizer.step()


def batches_cached(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
    batches = list(loader)
    for x, y in batches * 2:
        train_step(model, optimizer, x, y)


def rows_seen_first_and_trained_on_later(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
    buffer = []
    for x, y in loader:
        buffer.append((x, y + 0.1 * predict_step(model, x)))
    for x, y in buffer:
        train_step(model, optimizer, x, y)


def a_look_at_the_first_batch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
    assert model(next(iter(loader))[0]).shape[1] == 1
    for x, _ in loader:
        model(x)
        break
    fit(model, optimizer, loader)


def gradients_by_autograd(model: nn.Module, _: torch.optim.Optimizer, loader: Loader) -> None:
    for x, y in loader:
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)


def every_other_batch_ahead(loader: Loader) -> Iterator[Any]:
    batches = iter(loader)
    ahead = [next(batches), next(batches)]
    while ahead:
        ahead += [batch for batch in [next(batches, None)] if batch is not None]
        yield ahead.pop(0)


def batches_fetched_ahead(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
    for x, y in every_other_batch_ahead(loader):
        train_step(model, optimizer, x, y)


TRAINING = (
    losses_of_an_epoch_added_up,
    batches_cached,
    rows_seen_first_and_trained_on_later,
    a_look_at_the_first_batch,
    gradients_by_autograd,
    batches_fetched_ahead,
)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_training_of_any_form_is_no_error(world_size: int) -> None:
    def program(session: Session) -> list[Any]:
        found = []
        for train in TRAINING:
            model, optimizer = made()
            for _epoch in range(2):
                train(model, optimizer, DataLoader(data(24), batch_size=12))
            found.append([parameter.detach() for parameter in model.parameters()])
        assert not any("without a backward" in text for text in session.said)
        return found

    check_against_one_process(program, world_size)


def test_who_asks_for_its_share_in_evaluations_gets_it_in_these_too() -> None:
    def program(_: Session) -> int:
        model, optimizer = made()
        loader = DataLoader(data(), batch_size=8)
        fit(model, optimizer, loader)
        return len(with_the_mode_inside(model, loader))

    assert run_ranks(2, program, evaluation="sharded") == [13, 13]


def test_training_that_begins_in_the_mode_an_evaluation_left_is_shared_out() -> None:
    """A framework runs training and evaluation by one loop, so the next training pass begins in eval mode."""

    def program(_: Session) -> Any:
        model, optimizer = made()
        training, held_out = DataLoader(data(), batch_size=8, shuffle=True), DataLoader(data(10), batch_size=5)
        rows = []
        for _epoch in range(3):
            rows.append(Engine(lambda batch: train_step(model, optimizer, *batch)).run(training))
            model.eval()
            rows.append(Engine(lambda batch: predict_step(model, batch[0])).run(held_out))
        return rows, [parameter.detach() for parameter in model.parameters()]

    _, wanted = alone(program)
    for rows, found in run_ranks(2, program):
        assert rows == [13, 10] * 3
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_an_evaluation_over_the_data_of_training_stays_one() -> None:
    """The evaluation reads from another line, or the program sets the mode again."""

    def program(_: Session) -> Any:
        model, optimizer = made()
        loader, held_out = DataLoader(data(), batch_size=8), DataLoader(data(10), batch_size=5)
        rows = []
        for _epoch in range(2):
            fit(model, optimizer, loader)
            model.eval()
            rows.append([len(torch.cat([model(x) for x, _ in some])) for some in (held_out, loader)])
            model.train()
        return rows

    assert run_ranks(2, program) == [[[10, 26]] * 2] * 2


def test_rows_that_nothing_is_known_of_are_told_of_also_after_training() -> None:
    def program(session: Session) -> list[bool]:
        model, optimizer = made()
        loader = DataLoader(data(), batch_size=8)
        fit(model, optimizer, loader)
        told = []
        for _pass in range(3):
            told.append(any("without a backward" in text for text in session.said))
            torch.cat([x for x, _ in loader]).numpy()
        return told

    assert run_ranks(2, program) == [[False, False, True]] * 2  # a backward on the rows might have come
