"""``lagom.gradients.overlap``: large gradients that travel during a backward come out as on one machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import DivergenceError, LagomError
from lagom.exchange.agreement_exchange import AgreedExchange
from lagom.gradients import overlap
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, run_ranks
from tests.session.programs import Program, data, loop, mse, sgd, weights

WIDE = 400  # 1.3 MB in float64


@pytest.fixture(autouse=True)
def worth_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MIN_BYTES", 1 << 20)


def wide() -> nn.Sequential:
    layers = [nn.Linear(2, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 1)]
    return nn.Sequential(*layers).double()


def plain(_: Session) -> list[Tensor]:
    model = wide()
    return sgd(model, mse(model), rate=0.01)


def accumulating(_: Session) -> list[Tensor]:
    model: Any = wide()
    seen: list[Tensor] = []
    model[2].bias.register_hook(lambda grad: grad.sign())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number, (x, y) in enumerate(DataLoader(data(14), batch_size=3)):
        mse(model)(x, y).backward()
        seen += [p.grad.norm() for p in model.parameters() if p.grad is not None]
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return weights(model) + seen


def many_small_ones(_: Session) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(2, 150), *[nn.Linear(150, 150) for _ in range(40)], nn.Linear(150, 1)).double()
    return sgd(model, mse(model), rate=0.01)


def convolution(_: Session) -> list[Tensor]:
    model: Any = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 256, 3), nn.BatchNorm2d(256), nn.Flatten()
    ).double()
    model[3].to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for (x,) in DataLoader(TensorDataset(torch.randn(14, 3, 5, 5, dtype=torch.float64)), batch_size=5):
        optimizer.zero_grad()
        model(x).sin().square().mean().backward()
        optimizer.step()
    return weights(model)


def memory_in_common(_: Session) -> list[Tensor]:
    first, second = (nn.Parameter(torch.randn(WIDE, WIDE, dtype=torch.float64)) for _ in range(2))

    def step(x: Tensor, _: Tensor) -> None:
        first.grad = second.grad = None
        # The gradient of the sum is second's, and the backward comes to second before it comes to first.
        middle = (first * 2).view(-1) + second.view(-1)
        (middle.square() * x.mean()).sum().backward()
        with torch.no_grad():
            for p in (first, second):
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)

    loop(nn.Module(), step, batch_size=5)
    return [first.detach(), second.detach()]


def sums_in_halves_and_complex(_: Session) -> list[Tensor]:
    half = nn.Parameter(torch.ones(1000, 600, dtype=torch.bfloat16))
    turn = nn.Parameter(torch.ones(400, 400, dtype=torch.complex128))
    for (x,) in DataLoader(TensorDataset(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 9])), batch_size=4):
        ((half * x.mean().bfloat16()).sum() + (turn * 2j * x.mean()).real.sum()).backward()
    assert half.grad is not None
    assert turn.grad is not None
    return [half.grad, turn.grad]


PROGRAMS: list[Program] = [
    plain,
    accumulating,
    many_small_ones,
    convolution,
    memory_in_common,
    sums_in_halves_and_complex,
]
AS_OTHERS = (plain, convolution, sums_in_halves_and_complex)
"""These run with ``-m soak``; tests/gradients/test_gradient_averager.py has halves and complex numbers by default."""


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "program",
    [pytest.param(one, id=one.__name__, marks=pytest.mark.soak if one in AS_OTHERS else ()) for one in PROGRAMS],
)
def test_the_weights_are_those_of_one_machine(program: Program, world_size: int) -> None:
    if program is sums_in_halves_and_complex and world_size == 3:
        pytest.skip("bfloat16 does not hold its thirds")

    def run(session: Session) -> Any:
        sent = noted(session)
        return program(session), len(sent)

    expected = alone(program)
    for result, num_sent in run_ranks(world_size, run):
        assert num_sent > 0
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)


def noted(session: Session) -> list[int]:
    """Sizes of what is sent during backwards, from now on."""
    assert session.group is not None
    sent: list[int] = []
    all_reduce = session.group.all_reduce_aside

    def note(tensor: Tensor) -> Any:
        sent.append(tensor.numel())
        return all_reduce(tensor)

    session.group.all_reduce_aside = note  # type: ignore[method-assign]
    return sent


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((WIDE, WIDE), value, dtype=torch.float64))


def test_buckets_leave_before_the_backward_ends_and_nothing_small_does() -> None:
    def run(session: Session) -> Any:
        sent, seen, small = noted(session), [], nn.Linear(2, 2)
        first, second = parameter(), parameter()
        for _ in range(3):
            middle = first * 2
            middle.register_hook(lambda _: seen.append(len(sent)))
            (middle * second).sum().backward()
            small(torch.ones(1, 2)).sum().backward()
        return seen, sent

    # The first time nothing is known; the second time the one that is ready before the end.
    assert run_ranks(2, run) == [([0, 1, 3], [WIDE**2] * 4)] * 2


def test_ranks_that_reach_something_else_than_before_get_the_union() -> None:
    def run(session: Session) -> Any:
        sent, experts = noted(session), [parameter() for _ in range(3)]
        found = []
        for step in range(8):
            for expert in experts:
                expert.grad = None
            mine = 0 if step < 3 or step == 7 else (session.rank + step) % 3
            (experts[mine] * (1 + session.rank)).sum().backward()
            found.append([None if e.grad is None else e.grad.mean().item() for e in experts])
        return found, len(sent)

    def expected(step: int) -> list[float | None]:
        sums = [0.0] * 3
        for rank in range(2):
            sums[0 if step < 3 or step == 7 else (rank + step) % 3] += (1 + rank) / 2
        return [total or None for total in sums]

    assert run_ranks(2, run) == [([expected(step) for step in range(8)], 2)] * 2


class Sometimes(torch.autograd.Function):
    """Its second input has a gradient only when asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, has_gradient: bool) -> Tensor:
        ctx.has_gradient = has_gradient
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient * 2 if ctx.has_gradient else None, None


@pytest.mark.parametrize(
    "ranks_with", [(), (1, 2), *(pytest.param(other, marks=pytest.mark.soak) for other in ((0,), (0, 1, 2)))]
)
def test_a_gradient_that_does_not_come_after_all_counts_as_zero(ranks_with: tuple[int, ...]) -> None:
    def run(session: Session) -> Any:
        sent, first, second = noted(session), parameter(), parameter()
        for step in range(4):
            second.grad = first.grad = None
            has_gradient = step < 2 or session.rank in ranks_with
            Sometimes.apply(first, second, has_gradient).sum().backward()  # type: ignore[no-untyped-call]
        assert first.grad is not None
        assert torch.equal(first.grad, torch.ones_like(first))
        return len(sent), None if second.grad is None else second.grad.mean().item()

    mean = pytest.approx(2 * len(ranks_with) / 3) if ranks_with else None
    assert run_ranks(3, run) == [(6, mean)] * 3


def test_an_exception_during_a_backward_leaves_the_next_one_right() -> None:
    def run(session: Session) -> Any:
        sent, first, second = noted(session), parameter(), parameter()

        def failing(_: Tensor) -> None:
            # On rank 0 after the first bucket has left, on rank 1 before.
            raise ZeroDivisionError

        for step in range(5):
            first.grad = second.grad = None
            middle, after = first * 2, second * (1 + session.rank)
            loss = (middle * after).sum()
            if step == 2:
                (after if session.rank else middle).register_hook(failing)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                assert first.grad is None
            else:
                loss.backward()
        assert first.grad is not None
        assert second.grad is not None
        return first.grad.mean().item(), second.grad.mean().item(), len(sent)

    assert run_ranks(2, run) == [(3.0, 3.0, 8)] * 2


def test_a_failed_backward_without_memory_for_its_buckets_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Session) -> Any:
        first, second = parameter(), parameter()
        for _step in range(3):
            (first * second).sum().backward()
        middle = first * 2

        def failing(_: Tensor) -> None:
            monkeypatch.setattr(torch, "zeros_like", no_memory)
            raise torch.OutOfMemoryError("out of memory")

        def no_memory(_: Tensor) -> None:
            raise torch.OutOfMemoryError("out of memory again")

        middle.register_hook(failing)
        first.grad = None
        with pytest.raises(LagomError, match="out of memory again"):
            (middle * second).sum().backward()
        monkeypatch.undo()
        assert first.grad is None
        assert second.grad is not None
        return second.grad.unique().tolist()

    assert run_ranks(2, run) == [[3.0]] * 2


def test_a_reentrant_checkpoint_that_comes_late_is_an_error_and_one_that_was_always_there_is_right() -> None:
    def late(session: Session, p: nn.Parameter, q: nn.Parameter) -> float:
        for step in range(4):
            p.grad = None
            x = q * (1 + session.rank)
            inner = checkpoint(lambda x: x * p, x, use_reentrant=True) if step > 2 else x * p
            (inner.sum() + (p * 2).sum()).backward()
        assert p.grad is not None
        return p.grad.mean().item()

    # The bucket of what was made last leaves first.
    assert run_ranks(2, lambda session: late(session, parameter(), parameter())) == [3.5] * 2
    with pytest.raises(RankFailedError, match="use_reentrant=False"):
        run_ranks(2, lambda session: late(session, *[parameter(), parameter()][::-1]))

    def always(session: Session) -> Any:
        p, sent = parameter(), noted(session)
        for _ in range(4):
            p.grad = None
            x = torch.ones(WIDE, WIDE, dtype=torch.float64, requires_grad=True)
            inner = checkpoint(lambda x: x * p * (1 + session.rank), x, use_reentrant=True)
            inner.sum().backward()
        assert p.grad is not None
        return p.grad.mean().item(), sent

    assert run_ranks(2, always) == [(1.5, [])] * 2


@pytest.mark.soak  # tests/gradients/test_failing_backward.py has such ranks
def test_ranks_at_different_places_are_an_error_at_the_start_of_a_backward() -> None:
    def run(session: Session) -> str:
        p = parameter()
        for _ in range(3):
            p.sum().backward()
        with pytest.raises(DivergenceError) as caught:
            session.check_place("another place") if session.rank else p.sum().backward()
        return str(caught.value)

    assert all("rank 0 at the start of a backward, rank 1 at another place" in text for text in run_ranks(2, run))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_are_differentiated_wait() -> None:
    def run(session: Session) -> Any:
        p, sent = parameter(), noted(session)
        for _ in range(2):
            p.square().sum().backward()
        p.grad = None
        (p.square() * (1 + session.rank)).sum().backward(create_graph=True)
        assert p.grad is not None
        (by_p,) = torch.autograd.grad(p.grad.sum(), p)
        return len(sent), by_p.mean().item()

    assert run_ranks(2, run) == [(1, 3.0)] * 2


@pytest.mark.soak  # a test above has the gradients of such ranks
def test_ranks_that_keep_reaching_different_leaves_stop_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MIN_BYTES", 1 << 17)

    def run(session: Session) -> Any:
        assert session.backwards.gradient_averager is not None
        asked = []
        exchange = AgreedExchange.exchange

        def note(self: AgreedExchange, signed: bytes) -> bool:
            asked.append(signed)
            return exchange(self, signed)

        monkeypatch.setattr(AgreedExchange, "exchange", note)
        experts = [nn.Parameter(torch.ones(150, 150, dtype=torch.float64)) for _ in range(2)]
        for _ in range(2):
            experts[0].sum().backward()
        for _ in range(200):
            experts[session.rank].sum().backward()
        return len(asked)

    assert run_ranks(2, run) == [1 + 9] * 2


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_gradients_that_have_no_memory_are_averaged(world_size: int) -> None:
    class Lazy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch._efficientzerotensor(gradient.shape, dtype=gradient.dtype)

    def run(_: Session) -> Any:
        torch.manual_seed(0)
        lazy: Any = Lazy.apply
        model: Any = wide()
        large: Any = nn.Parameter(torch.randn(WIDE, WIDE, dtype=torch.float64))
        inputs = torch.randn(12, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD([*model.parameters(), large], lr=0.1)
        for _step in range(4):
            optimizer.zero_grad()
            (model(inputs).square().mean() + lazy(large).sum()).backward()
            optimizer.step()
        found = torch.autograd.grad(lazy(large).sum() + model(inputs).mean(), [large, model[2].weight])
        gradients = [one.sum().item() for one in (large.grad, *found)]
        return gradients, [one.detach() for one in model.parameters()]

    expected = alone(run)
    for found in run_ranks(world_size, run, batches="whole"):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
