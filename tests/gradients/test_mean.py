"""Gradients that travel as halves, and that are combined by Adasum: against formulas by hand."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import LagomError
from lagom.exchange.agreement_exchange import AgreedExchange
from lagom.session.session import Session
from tests.ranks import run_ranks

SHAPES = ((500, 400), (10, 20), (50,), ())
"""The first is too large to travel beside the signature on any of 2 to 4 ranks; the others are not."""


def constants(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the gradients that a rank shall have in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def averaged(session: Session, own: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """Run a backward whose gradients are ``own`` on this rank; return the averages."""
    for one in parameters:
        one.grad = None
    torch.stack([(p * c).sum() for p, c in zip(parameters, own, strict=True)]).sum().backward()
    return [p.grad.clone() for p in parameters if p.grad is not None]


def steps(number: int = 1, dtype: torch.dtype = torch.float32) -> Callable[[Session], Any]:
    def run(session: Session) -> Any:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        return [averaged(session, constants(session.rank, step, dtype), parameters) for step in range(number)]

    return run


def the_same(results: list[Any]) -> Any:
    """Check that all ranks returned the same bits, and return rank 0's result."""
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    return results[0]


@pytest.mark.parametrize("collectives", ["auto", pytest.param("gloo", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("compression", "dtype"),
    [pytest.param("fp16", torch.float16, marks=pytest.mark.soak), ("bf16", torch.bfloat16)],  # a test below has fp16
)
def test_halves_are_added_as_single_precision(compression: str, dtype: torch.dtype, collectives: Any) -> None:
    world_size = 3
    found = the_same(run_ranks(world_size, steps(2), gradient_compression=compression, collectives=collectives))
    eps = torch.finfo(dtype).eps
    for step in range(2):
        every = zip(*(constants(rank, step) for rank in range(world_size)), strict=True)
        means = [torch.stack([one.to(dtype).float() for one in own]).mean(dim=0) for own in every]
        large, *rest = found[step]
        # The large one travels back as halves, too; half a unit of the last place is what that loses.
        assert (large - means[0]).abs().le(eps / 2 * means[0].abs() + 1e-7).all()
        assert not torch.equal(large, means[0])
        for one, mean in zip(rest, means[1:], strict=True):
            torch.testing.assert_close(one, mean, rtol=1e-6, atol=1e-7)


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """Combine two gradients by the published formula."""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


@pytest.mark.parametrize("world_size", [3, *(pytest.param(other, marks=pytest.mark.soak) for other in (2, 4))])
def test_adasum_is_the_published_formula_over_a_tree(world_size: int) -> None:
    (found,) = the_same(run_ranks(world_size, steps(dtype=torch.float64), reduction="adasum"))
    every = [constants(rank, dtype=torch.float64) for rank in range(world_size)]
    for i, one in enumerate(found):
        a, b, *others = (own[i] for own in every)
        expected = adasum(a, b)
        if len(others) == 1:
            expected = adasum(expected, others[0])
        elif others:
            expected = adasum(expected, adasum(*others))
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero_lvl", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_every_backward_of_a_loop_that_accumulates_is_combined_by_itself(zero_lvl: int) -> None:
    """Adasum is not linear, so no backward may be postponed, from the first step to the last."""
    num_steps = 6  # an ordinary average is put off from the third or so on

    def run(session: Session) -> Any:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        for step in range(num_steps):
            for half in range(2):
                own = constants(session.rank, 2 * step + half, torch.float64)
                torch.stack([(p * c).sum() for p, c in zip(parameters, own, strict=True)]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [[p.detach().clone() for p in parameters]]

    (found,) = the_same(run_ranks(2, run, reduction="adasum", zero_lvl=zero_lvl))
    for i, one in enumerate(found):
        pairs = [
            (constants(0, at, torch.float64)[i], constants(1, at, torch.float64)[i]) for at in range(2 * num_steps)
        ]
        torch.testing.assert_close(one, -torch.stack([adasum(*pair) for pair in pairs]).sum(0), rtol=1e-9, atol=1e-9)


def test_adasum_adds_what_is_at_right_angles_averages_what_is_equal_and_ignores_zeros() -> None:
    def run(session: Session) -> Any:
        first = session.rank == 0
        angles = torch.tensor([3.0, 0.0] if first else [0.0, 4.0])
        zeros = torch.tensor([3.0, 5.0] if first else [0.0, 0.0])
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        return averaged(session, [angles, torch.tensor([1.5, 2.0]), zeros], parameters)

    for compression in (None, "bf16"):
        for angles, equal, zeros in run_ranks(2, run, reduction="adasum", gradient_compression=compression):
            assert (angles.tolist(), equal.tolist(), zeros.tolist()) == ([3, 4], [1.5, 2], [3, 5])


def sent(world_size: int, **gradients: Any) -> int:
    """Bytes that a rank gives away for the gradients of a step, beside signatures."""

    def run(session: Session) -> int:
        assert session.group is not None
        assert session.backwards.gradient_averager is not None
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        averaged(session, constants(session.rank), parameters)
        group, total = session.group, [0]
        others = world_size - 1

        def counted(owner: Any, name: str, share: Callable[..., int]) -> None:
            plain = getattr(owner, name)

            def call(*args: Any, **options: Any) -> Any:
                total[0] += share(*args)
                return plain(*args, **options)

            setattr(owner, name, call)

        # A ring's sum sends each part twice; rows go to one rank each; and a whole comes of parts in as many steps.
        counted(group, "all_reduce_later", lambda one, *_: 2 * one.nbytes * others // world_size)
        counted(group, "all_to_all", lambda rows, *_: rows.nbytes * others // world_size)
        counted(group, "all_gather_into", lambda whole, *_: whole.nbytes * others // world_size)
        counted(AgreedExchange, "average", lambda _, small, *rest: len(small.packed or b"") * others)
        averaged(session, constants(session.rank, 1), parameters)
        return total[0]

    numbers: list[int] = run_ranks(world_size, run, **gradients)
    assert len(set(numbers)) == 1
    return numbers[0]


def test_halves_are_half_of_what_is_sent() -> None:
    whole = sent(2)
    assert whole > 4 * 500 * 400
    for compression in ("bf16", "fp16"):
        assert sent(2, gradient_compression=compression) == pytest.approx(whole / 2, rel=0.01)
    assert sent(2, gradient_compression="bf16", reduction="adasum") == pytest.approx(whole / 2, rel=0.01)
    assert sent(2, reduction="adasum") == pytest.approx(whole, rel=0.01)


class Network(nn.Module):
    """A model with BatchNorm, a large matrix, and one too large for the signature's message."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 600), nn.BatchNorm1d(600)
        self.second, self.last = nn.Linear(600, 180), nn.Linear(180, 1)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))


def trained(session: Session) -> Any:
    """Two backwards for each step, a batch at the end that is smaller than the others; losses, and the weights."""
    inputs = torch.randn(38, 6, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=6, shuffle=True)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            (nn.functional.mse_loss(model(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        loss = float(nn.functional.mse_loss(model(inputs), inputs[:, :1].sin()))
    return loss, [p.detach().clone() for p in model.state_dict().values()]


REFERENCE: dict[Any, Any] = {}
again = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("world_size", "gradients", "tolerance"),
    [
        again(2, {"gradient_compression": "bf16"}, 0.01),
        again(2, {"gradient_compression": "bf16", "batches": "whole", "zero_lvl": 1}, 0.01),
        (2, {"gradient_compression": "fp16", "zero_lvl": 2}, 0.002),
        again(2, {"gradient_compression": "bf16", "zero_lvl": 3}, 0.01),
        again(2, {"gradient_compression": "fp16", "batches": "per_rank"}, 0.002),
        (2, {"reduction": "adasum"}, None),
        *(again(3, *other) for other in (({"gradient_compression": "bf16"}, 0.01), ({"reduction": "adasum"}, None))),
        again(3, {"gradient_compression": "fp16", "zero_lvl": 2}, 0.002),
        again(2, {"reduction": "adasum", "zero_lvl": 2, "gradient_compression": "fp16", "batches": "whole"}, None),
    ],
)
def test_a_program_trains_as_it_does_without(
    world_size: int, gradients: dict[str, Any], tolerance: float | None
) -> None:
    key = world_size, gradients.get("batches", "split")
    if key not in REFERENCE:
        REFERENCE[key] = run_ranks(world_size, trained, batches=key[1])[0]
    found = run_ranks(world_size, trained, **gradients)
    the_same([[weights] for _, weights in found])
    loss, weights = found[0]
    plain_loss, plain = REFERENCE[key]
    assert loss < 0.4  # it begins at 0.55
    if tolerance is not None:
        assert loss == pytest.approx(plain_loss, rel=10 * tolerance, abs=tolerance)
        moved = max(float((a.float() - b.float()).abs().max()) for a, b in zip(weights, plain, strict=True))
        assert 0 < moved < tolerance


def test_gradients_that_are_asked_for_are_averages_whatever_becomes_of_others() -> None:
    def run(session: Session) -> Any:
        weight = nn.Parameter(torch.ones(500, 400))
        (found,) = torch.autograd.grad((weight * constants(session.rank)[0]).sum(), [weight])
        warnings.simplefilter("ignore")  # of torch's, that the graph refers to itself
        with pytest.raises(LagomError, match="create_graph=True needs averages"):
            (weight**2 * constants(session.rank)[0]).sum().backward(create_graph=True)
        return found

    mean = torch.stack([constants(rank)[0] for rank in range(2)]).mean(dim=0)
    for found in run_ranks(2, run, reduction="adasum"):
        torch.testing.assert_close(found, mean)


def test_adasum_refuses_sparse_gradients_on_all_ranks() -> None:
    def run(session: Session) -> str:
        table = nn.Embedding(9, 2, sparse=True)
        with pytest.raises(LagomError, match="no rule for sparse gradients") as caught:
            table(torch.tensor([session.rank])).sum().backward()
        return str(caught.value)

    assert len(set(run_ranks(2, run, reduction="adasum"))) == 1


def test_one_rank_sends_nothing() -> None:
    plain = run_ranks(1, trained, patches=False)[0]
    asked: list[dict[str, Any]] = [{"gradient_compression": "bf16"}, {"reduction": "adasum"}, {"lr_scaling": "linear"}]
    for settings in asked:
        loss, weights = run_ranks(1, trained, **settings)[0]
        assert loss == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(weights, plain[1], strict=True))
