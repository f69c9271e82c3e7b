"""BatchNorm on several ranks has the statistics and gradients of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import AgreedExchange
from lagom.exchange.group import Group
from lagom.patching.replace import replaced
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import alone, check_against_one_process, run_ranks

Program = Callable[[Session], dict[str, Tensor]]


def train(
    model: nn.Module,
    shape: tuple[int, ...] = (2,),
    count: int = 14,
    batch_size: int = 6,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    every: int = 1,
) -> dict[str, Tensor]:
    """Train two epochs of SGD in float64, then evaluate; return the resulting state."""
    model.double()
    x = torch.randn(count, *shape, dtype=torch.float64) * 3 + 2
    y = torch.sin(x.flatten(1)[:, :1])
    measure = loss or (lambda x, y: F.mse_loss(model(x), y))
    model.train()
    measure(x[:3], y[:3]).detach()  # creates the parameters of lazy modules
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for epoch in range(2):
        model.train()
        for step, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)):
            (measure(a, b) / every).backward()
            if step % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            evaluated = torch.cat([model(a) for a, _ in DataLoader(TensorDataset(x, y), batch_size=4)])
        assert epoch < 2
    return {**model.state_dict(), "evaluated": evaluated}


def normed(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, **options), nn.Tanh(), nn.Linear(8, 1))


def images() -> nn.Sequential:
    first, second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 2)
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), second, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 1))


def channels_last(_: Session) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
    return train(model.to(memory_format=torch.channels_last), (2, 6, 6))  # type: ignore[call-overload]


def volumes() -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(16, 1))


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))


def series() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 1))


def two_in_sequence(_: Session) -> dict[str, Tensor]:
    first, second = nn.BatchNorm1d(2, momentum=0.3), nn.BatchNorm1d(8, eps=0.1)
    return train(nn.Sequential(first, nn.Linear(2, 8), nn.Sigmoid(), second, nn.Linear(8, 1)))


def called_twice(_: Session) -> dict[str, Tensor]:
    model = normed()
    return train(model, loss=lambda x, y: F.mse_loss(model(x), y) + (model(x + y) * y).abs().mean())


def of_each_row_and_time(_: Session) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(3), nn.Unflatten(0, (-1, 5)), nn.Flatten(), nn.Linear(15, 1))
    return train(model, (5, 3))


class Bank(nn.Module):
    """Normalises data that is no batch, along with the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.rows = nn.Parameter(torch.randn(rows, 2))
        self.scale = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x) + (x @ self.norm(self.scale(self.rows)).T).softmax(1).square().sum(
            1, keepdim=True
        )
        return result


def checkpointed(_: Session) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 1))
    return train(model, loss=lambda x, y: F.mse_loss(model[1](checkpoint(model[0], x, use_reentrant=False)), y))


def gradient_penalty(_: Session) -> dict[str, Tensor]:
    model = normed()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + slope.square().sum(1).mean()

    return train(model, loss=loss)


def functional(_: Session) -> dict[str, Tensor]:
    model = nn.Linear(2, 1)
    return train(model, loss=lambda x, y: F.mse_loss(model(F.batch_norm(x, None, None, training=True)), y))


def momentum_encoder(_: Session) -> dict[str, Tensor]:
    model, slow = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = slow(x)
        return F.mse_loss(model(x), wanted)

    return {**train(model, loss=loss), **slow.state_dict()}


def frozen(_: Session) -> dict[str, Tensor]:
    model = normed()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        model[1].eval()
        return F.mse_loss(model(x), y)

    return train(model, loss=loss)


def many_channels(_: Session) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(2, 6000), nn.BatchNorm1d(6000), nn.Tanh(), nn.Linear(6000, 1))
    return train(model, count=8, loss=lambda x, y: F.mse_loss(model(x), y) * 1e-3)


def compiled(_: Session) -> dict[str, Tensor]:
    model = normed()
    warnings.simplefilter("ignore")  # torch.compile warns after a graph break
    fast = torch.compile(model, backend="eager")
    # Two kinds of batches: each further shape is compiled anew.
    return train(model, count=10, loss=lambda x, y: F.mse_loss(fast(x), y))


PROGRAMS: dict[str, Program] = {
    "mlp": lambda _: train(normed()),
    "convolutions": lambda _: train(images(), (2, 6, 6)),
    "volumes": lambda _: train(volumes(), (1, 3, 3, 3)),
    "short tail": lambda _: train(series(), (1, 5), count=7),
    "tail of two": lambda _: train(normed(), count=8),
    "cumulative": lambda _: train(normed(momentum=None)),
    "not affine": lambda _: train(normed(affine=False)),
    "untracked": lambda _: train(normed(track_running_stats=False)),
    "lazy": lambda _: train(lazy()),
    "accumulation": lambda _: train(normed(), every=2),
    "memory bank": lambda _: train(Bank(5)),
    "channels last": channels_last,
    "two in sequence": two_in_sequence,
    "called twice": called_twice,
    "of each row and time": of_each_row_and_time,
    "checkpointed": checkpointed,
    "gradient penalty": gradient_penalty,
    "functional": functional,
    "momentum encoder": momentum_encoder,
    "frozen": frozen,
    "many channels": many_channels,
    "compiled": compiled,
}


VARIANTS = (
    "mlp",
    "tail of two",
    "called twice",
    "of each row and time",
    "volumes",
    "not affine",
    "untracked",
    "lazy",
    "channels last",
    "two in sequence",
    "many channels",
    "compiled",
)
"""Programs that take the way of others; the last is tested by default below."""
ON_THREE = ("short tail",)
"""Programs in which a third rank has no row by default; the rest have two ranks."""


def cases() -> Iterator[Any]:
    """Yield each program on two ranks and on three, one of them by default."""
    for name, program in PROGRAMS.items():
        for world_size in (2, 3):
            is_default = name not in VARIANTS and world_size == (3 if name in ON_THREE else 2)
            marks = [] if is_default else [pytest.mark.soak]
            yield pytest.param(program, world_size, id=f"{name}-{world_size}", marks=marks)


@pytest.mark.parametrize(("program", "world_size"), list(cases()))
def test_weights_statistics_and_evaluation_are_those_of_one_machine(program: Program, world_size: int) -> None:
    expected = alone(program)
    results = run_ranks(world_size, program)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.soak
def test_a_compiled_module_is_right_after_torch_has_cleared_what_dynamo_knows() -> None:
    expected = alone(compiled)
    torch._dynamo.trace_rules.clear_lru_cache()  # as init_process_group does
    for result in run_ranks(2, compiled):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_a_share_of_one_sample_is_enough_and_a_batch_of_one_is_not() -> None:
    def run(_: Session) -> Any:
        model = nn.BatchNorm1d(2)
        for (x,) in DataLoader(TensorDataset(torch.arange(8.0).view(4, 2)), batch_size=2):
            model(x).sum().backward()
        for (x,) in DataLoader(TensorDataset(torch.ones(1, 2)), batch_size=2):
            with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
                model(x)
        return [*model.buffers()]

    expected = alone(run)
    for result in run_ranks(3, run):
        torch.testing.assert_close(result, expected)


def test_single_precision_loses_nothing_against_one_machine() -> None:
    def run(session: Session) -> Any:
        torch.manual_seed(1)
        x = torch.randn(60, 3, 4) * torch.tensor([1e-3, 1.0, 10.0]).view(3, 1) + torch.tensor([1.0, 30.0, -9]).view(
            3, 1
        )
        exact = x.double()
        model = nn.BatchNorm1d(3, momentum=1.0)
        (mine,) = next(iter(DataLoader(TensorDataset(x), batch_size=60)))
        model(mine)
        mean, var = exact.mean((0, 2)), exact.var((0, 2))
        assert model.running_mean is not None
        assert model.running_var is not None
        return ((model.running_mean - mean) / mean).abs().max(), ((model.running_var - var) / var).abs().max()

    mean, var = alone(run)
    for result in run_ranks(3, run):
        assert result[0] <= max(2 * mean, 2e-7)
        assert result[1] <= max(2 * var, 1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.soak)])
def test_half_precision(kind: torch.dtype) -> None:
    def run(_: Session) -> Any:
        model = nn.BatchNorm1d(2).to(kind)
        model.weight.data.mul_(3)
        for (x,) in DataLoader(TensorDataset(torch.arange(12.0).view(6, 2).to(kind)), batch_size=6):
            y = model(x)
            (y * y[:, :1]).mean().backward()
        assert y.dtype == kind
        assert model.weight.grad is not None
        return [model.weight.grad, *model.buffers()]

    check_against_one_process(run, rtol=0.02, atol=0.02)


def test_mixed_precision() -> None:
    def run(_: Session) -> Any:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        for (x,) in DataLoader(TensorDataset(torch.arange(12.0).view(6, 2)), batch_size=6):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            y.float().pow(3).mean().backward()
        assert y.dtype == torch.bfloat16
        return [p.grad for p in model[1].parameters()] + [*model[1].buffers()]

    check_against_one_process(run, rtol=0.02, atol=0.02)


def test_replicated_batches_and_evaluation_are_left_alone() -> None:
    def run(_: Session) -> Any:
        model, x = nn.BatchNorm1d(2).double(), torch.randn(5, 2, dtype=torch.float64)
        model(x)
        for (a,) in DataLoader(TensorDataset(x), batch_size=3):
            model(a).sum().backward()
        with torch.no_grad():
            for (a,) in DataLoader(TensorDataset(x), batch_size=2):
                model(torch.cat([a, a]))  # in training mode, by mistake or on purpose
        model(x)
        return [*model.buffers()]

    check_against_one_process(run, 3, rtol=1e-12, atol=1e-12)


def test_ranks_that_evaluate_their_shares_do_not_wait_for_each_other() -> None:
    def run(_: Session) -> int:
        model = nn.BatchNorm1d(2)
        for (x,) in DataLoader(TensorDataset(torch.randn(6, 2, 3)), batch_size=3):
            model(x).sum().backward()
        with torch.no_grad():
            return sum(model(x).shape[0] for (x,) in DataLoader(TensorDataset(torch.randn(9, 2, 3)), batch_size=4))

    assert run_ranks(2, run, evaluation="sharded") == [5, 4]


def test_it_can_be_switched_off() -> None:
    def run(_: Session) -> Any:
        model = nn.BatchNorm1d(1, momentum=1.0)
        (x,) = next(iter(DataLoader(TensorDataset(torch.arange(4.0).view(4, 1)), batch_size=4)))
        model(x)
        assert model.running_mean is not None
        return model.running_mean.item()

    assert run_ranks(2, run, sync_batchnorm=False) == [1.0, 2.0]
    assert run_ranks(2, run) == [1.5, 1.5]


def test_instance_norm_is_left_alone() -> None:
    def run(_: Session) -> Any:
        model = nn.InstanceNorm1d(1, track_running_stats=True, momentum=1.0)
        (x,) = next(iter(DataLoader(TensorDataset(torch.arange(8.0).view(4, 1, 2)), batch_size=4)))
        model(x)
        assert model.running_mean is not None
        return model.running_mean.item()

    first, second = run_ranks(2, run)
    assert first != second


def test_a_compiled_module_without_graph_breaks_is_refused() -> None:
    def run(_: Session) -> None:
        model = torch.compile(nn.BatchNorm1d(2), backend="eager", fullgraph=True)
        (x,) = next(iter(DataLoader(TensorDataset(torch.randn(4, 2)), batch_size=4)))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model(x)

    run_ranks(2, run)


def test_branches_with_different_layers_are_an_error_on_every_rank() -> None:
    def run(session: Session) -> str:
        layers = nn.ModuleList([nn.BatchNorm1d(2) for _ in range(2)])
        other = nn.Linear(2, 2)
        (x,) = next(iter(DataLoader(TensorDataset(torch.randn(4, 2)), batch_size=4)))
        try:
            layers[session.rank](x) if session.rank < 2 else other(x).sum().backward()
        except DivergenceError as error:
            return str(error)
        return ""

    for text in run_ranks(2, run):
        assert "BatchNorm" in text
    for text in run_ranks(3, run):
        assert "rank 2 at a backward" in text


def test_a_rank_whose_rows_are_all_filtered_out_takes_part() -> None:
    def run(session: Session) -> Any:
        model = nn.BatchNorm1d(2, momentum=1.0)
        (x,) = next(iter(DataLoader(TensorDataset(torch.arange(12.0).view(6, 2)), batch_size=6)))
        y = model(x[x[:, 0] % 4 == 0])  # with two ranks: all rows of rank 0
        y.square().sum().backward()
        assert model.weight.grad is not None
        return model.running_mean, model.running_var, model.weight.grad / session.world_size

    results = run_ranks(2, run)
    expected = torch.arange(12.0).view(6, 2)[::2]
    for mean, var, _ in results:
        torch.testing.assert_close(mean, expected.mean(0))
        torch.testing.assert_close(var, expected.var(0))


@contextmanager
def as_on_gpus(session: Session) -> Iterator[None]:
    """Patch with an exchange that has no room for statistics in its first message, as on GPUs."""
    init = AgreedExchange.__init__

    def without_room(self: AgreedExchange, group: Group, size: int = 0) -> None:
        init(self, group, 0)

    with replaced(AgreedExchange, "__init__", without_room), patched(session):
        yield


@pytest.mark.needs("zero")
def test_on_gpus_an_exchange_begins_with_a_message_which_may_ask_for_something_else() -> None:
    def run(session: Session) -> tuple[Tensor, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        x = torch.randn(24, 2).double()
        states = []
        for i, (batch,) in enumerate(DataLoader(TensorDataset(x), batch_size=6)):
            optimizer.zero_grad()
            if i and session.rank == 0:  # the other rank is already in the first exchange of its forward
                states.append(copy.deepcopy(optimizer.state_dict()["state"]))
            model(batch).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in (*model.parameters(), *model.buffers())]), states

    def run_as_on_gpus(session: Session) -> tuple[Tensor, list[Any]]:
        with as_on_gpus(session):
            return run(session)

    weights, states = alone(run)
    found = run_ranks(2, run_as_on_gpus, patches=False, zero_lvl=1)
    for mine, _ in found:
        torch.testing.assert_close(mine, weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[0][1], states, rtol=0, atol=1e-12)


def test_on_gpus_too_different_layers_are_an_error() -> None:
    def run(session: Session) -> str:
        with as_on_gpus(session):
            layers = [nn.BatchNorm1d(2) for _ in range(2)]
            (x,) = next(iter(DataLoader(TensorDataset(torch.randn(4, 2)), batch_size=4)))
            with pytest.raises(DivergenceError, match="another layer in place of a BatchNorm") as caught:
                layers[session.rank](x)
        return str(caught.value)

    first, second = run_ranks(2, run, patches=False)
    assert first == second
