"""``step_speed``: the time of training steps on ranks, and what would help a program."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lagom.session.session import Session
from lagom.session.step_speed import step_speed
from lagom.speed import Speed, StepPart
from tests.ranks import alone, run_ranks

BATCH_S, BATCH = 0.02, 4


class Slow(Dataset[Tensor]):
    """Samples that each take a part of ``BATCH_S`` seconds."""

    def __len__(self) -> int:
        return 10 * BATCH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(BATCH_S / BATCH)
        return torch.full((3,), float(index))


class SlowStream(IterableDataset[Tensor]):
    """The same samples, one after another."""

    def __iter__(self) -> Any:
        return iter([Slow()[index] for index in range(10 * BATCH)])


class Mixing(nn.Linear):
    """Mixes the rows of its batch, so that ranks cannot split it."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        return found - found.mean(0)


def train(loader: Any, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> float:
    """Train, and return the mean seconds of the last 6 of 10 steps, which are those that count."""
    step = optimizer(model.parameters())
    ends = []
    for (x,) in loader if isinstance(loader.dataset, TensorDataset) else ((x,) for x in loader):
        step.zero_grad()
        model(x).square().mean().backward()
        step.step()
        ends.append(time.perf_counter())
    assert len(ends) == 10
    return (ends[-1] - ends[3]) / 6


def random_batches(rows: int, width: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(10 * rows, width)), batch_size=rows)


def part(speed: Speed, name: str) -> StepPart:
    return next(one for one in speed.parts if one.name == name)


class SlowCounting(Slow):
    """Counts its samples, so that every rank loads all of them."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


def slow_counting(session: Session) -> Speed:
    train(DataLoader(SlowCounting(), batch_size=BATCH), nn.Linear(3, 1))
    return step_speed(session)


def test_loading_that_is_not_divided_says_why() -> None:
    for speed in run_ranks(2, slow_counting, batches="whole"):
        assert part(speed, "loading").divided == 0
        assert "since SlowCounting changes its attributes" in speed.advice[0]
        assert "share_loading=True" in speed.advice[0]


def slow_loading(session: Session) -> tuple[Speed, float]:
    measured_s = train(DataLoader(Slow(), batch_size=BATCH), nn.Linear(3, 1))
    return step_speed(session), measured_s


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_parts_sum_to_the_step_and_slow_loading_is_named(world_size: int) -> None:
    for speed, measured_s in run_ranks(world_size, slow_loading, batches="whole"):
        assert (speed.world_size, speed.steps) == (world_size, 6)
        # Between two reads of the clock the system may run other processes.
        assert speed.step_s == pytest.approx(measured_s, rel=0.25)
        assert BATCH_S / BATCH * (BATCH // world_size) <= speed.seconds_of("loading") <= speed.step_s
        assert {one.name for one in speed.parts} >= {"loading", "optimizer", "own"}
        share = f"{speed.seconds_of('loading') / speed.step_s:.0%}"
        # The exchange counts as slower if other programs run.
        assert any(
            one.startswith(f"{share} of a step is loading: give the loader num_workers=") for one in speed.advice
        )
        assert part(speed, "loading").divided == (world_size > 1)
        assert all(one.divided == 0 for one in speed.parts if one.name in ("optimizer", "own"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_batches_split_loading_and_the_model_are_divided(world_size: int) -> None:
    for speed, _ in run_ranks(world_size, slow_loading, batches="split"):
        assert [part(speed, name).divided for name in ("loading", "forward", "backward")] == [1, 1, 1]
        assert part(speed, "optimizer").divided == 0
        assert speed.one_process_s > BATCH_S * 0.9  # a rank loads its share of the samples
        assert speed.seconds_of("exchange") > 0


def slow_stream(session: Session) -> Speed:
    train(DataLoader(SlowStream(), batch_size=BATCH), nn.Linear(3, 1))
    return step_speed(session)


def test_all_ranks_read_a_stream() -> None:
    for speed in run_ranks(2, slow_stream, batches="split"):
        assert part(speed, "loading").divided == 0
        assert part(speed, "forward").divided == 1


def shared_workers(session: Session) -> Speed:
    train(DataLoader(Slow(), batch_size=BATCH, num_workers=1), nn.Linear(3, 1))
    return step_speed(session)


def test_workers_that_serve_all_ranks_are_told_from_loading_on_each() -> None:
    speed = run_ranks(2, shared_workers, batches="whole", share_loading=True)[0]
    assert part(speed, "loading").shared == 1
    assert speed.seconds_of("loading") > BATCH_S / 2
    own = run_ranks(2, shared_workers, batches="whole", share_loading=False)[0]
    assert part(own, "loading").shared == 0
    assert "share_loading=True" in own.advice[0]


def split_model(session: Session) -> Speed:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    train(random_batches(512, 256), model)
    return step_speed(session)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_that_is_split_by_rows_is_divided_and_its_exchange_is_apart(world_size: int) -> None:
    for speed in run_ranks(world_size, split_model, batches="whole"):
        assert part(speed, "forward").divided > 0.5
        assert part(speed, "backward").divided > 0.5
        assert speed.seconds_of("exchange") > 0
        without = sum(one.seconds for one in speed.parts if one.name != "exchange")
        assert without < speed.one_process_s < world_size * without


def mixing_model(session: Session) -> tuple[Speed, Any]:
    train(random_batches(512, 512), Mixing(512, 512), torch.optim.SGD)
    return step_speed(session), session.forwards.whole_calls.modules()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_that_runs_whole_is_repeated_and_named_with_its_reason(world_size: int) -> None:
    for speed, (module,) in run_ranks(world_size, mixing_model, batches="whole"):
        assert part(speed, "forward").divided == part(speed, "backward").divided == 0
        assert any(text.endswith(f"every rank repeats: Mixing {module.text}") for text in speed.advice)
        assert speed.one_process_s <= speed.step_s


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def told_rows(session: Session) -> int:
    train(random_batches(64, 64), small_net())
    speed, rows = step_speed(session), session.forwards.whole_calls.modules()[0].pays_from
    assert rows is not None
    assert f"Sequential is small, so every rank computes all of it: batches of {rows:,} rows would be divided" in (
        speed.advice
    )
    return rows


def divides(session: Session) -> bool:
    rows: int = session.config.hparams["rows"]
    train(random_batches(rows, 64), small_net())
    return session.forwards.has_sliced


def test_a_small_model_is_told_the_number_of_rows_that_is_divided() -> None:
    rows, same = run_ranks(2, told_rows, batches="whole", always_slices=False)
    assert rows == same > 64
    for number, is_divided in ((rows, True), (rows // 2, False)):
        found = run_ranks(2, divides, batches="whole", always_slices=False, hparams={"rows": number})
        assert found == [is_divided] * 2


def tiny_model(session: Session) -> Speed:
    train(random_batches(8, 4), nn.Linear(4, 1))
    return step_speed(session)


def no_loader(session: Session) -> Speed:
    weight = torch.ones(3, requires_grad=True)
    for _ in range(10):
        (weight * 2).sum().backward()
    return step_speed(session)


def no_steps(session: Session) -> Speed:
    with torch.no_grad():
        for (x,) in random_batches(8, 4):
            nn.Linear(4, 1)(x)
    return step_speed(session)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_program_without_loader_or_module_has_steps_by_backward_or_none(world_size: int) -> None:
    for speed in run_ranks(world_size, no_loader, batches="whole"):
        assert speed.steps == (0 if world_size == 1 else 5)
        assert {one.name for one in speed.parts} <= {"backward", "exchange", "own"}
        assert not any("loading" in text or "module" in text for text in speed.advice)
    assert run_ranks(world_size, no_steps, batches="whole") == [Speed(world_size=world_size)] * world_size


class Outer(torch.optim.SGD):
    """Has an optimizer inside."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, 0.1)
        self.inner = torch.optim.SGD(parameters, 0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        time.sleep(0.01)


def nested_optimizers(session: Session) -> Speed:
    train(random_batches(8, 4), nn.Linear(4, 1), Outer)
    return step_speed(session)


def closures(session: Session) -> Speed:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss() -> Tensor:
        optimizer.zero_grad()
        time.sleep(0.01)
        found: Tensor = model(x).square().mean()
        found.backward()
        return found

    for (x,) in random_batches(8, 4):  # noqa: B007  # the closure reads it
        optimizer.step(loss)
    return step_speed(session)


def test_an_optimizer_in_another_and_a_closure_are_counted_once() -> None:
    for speed in run_ranks(2, nested_optimizers, batches="whole"):
        assert speed.seconds_of("optimizer") > 0.01
        assert speed.seconds_of("own") < speed.seconds_of("optimizer")
    for speed in run_ranks(2, closures, batches="whole"):
        assert speed.steps == 6
        assert speed.seconds_of("optimizer") > 0.01  # with the program's code in the closure
        assert min(speed.seconds_of("forward"), speed.seconds_of("backward")) > 0


def compiled_step(session: Session) -> tuple[int, float, int]:
    """Train with a compiled step; return the numbers of steps and of graphs, and the sum of the weights."""
    model, graphs = nn.Linear(4, 1), []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.1))
    step = torch.compile(optimizer.step, backend=count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules, which the first compilation imports
        for (x,) in random_batches(8, 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
    return step_speed(session).steps, float(model.weight.detach().sum()), len(graphs)


def test_a_compiled_optimizer_step_has_the_graphs_of_one_process() -> None:
    _, total, graphs = alone(compiled_step)
    for world_size in (1, 2):
        found = run_ranks(world_size, compiled_step, batches="whole")
        assert found == [(6, pytest.approx(total), graphs)] * world_size


def test_an_optimizer_that_is_sharded_is_divided() -> None:
    for speed in run_ranks(2, tiny_model, batches="whole", zero_lvl=1):
        assert part(speed, "optimizer").divided > 0.5


def joined(session: Session) -> Speed:
    dist.init_process_group()
    train(random_batches(8, 4), nn.Linear(4, 1))
    dist.destroy_process_group()
    return step_speed(session)


def test_a_program_that_divides_its_work_itself_has_no_steps() -> None:
    assert run_ranks(2, joined, batches="split") == [Speed(world_size=2)] * 2
