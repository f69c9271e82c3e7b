"""Training on several ranks gives the weights of one machine, whatever computes the gradients."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lagom.session.session import Session
from tests.ranks import alone, check_against_one_process, run_ranks
from tests.session.programs import (
    PROGRAMS,
    Program,
    compiled,
    compiled_loss,
    deepcopied,
    full_batch,
    inputs_only,
    kept_batches,
    large,
    mlp,
    mse,
    plain,
    reentrant,
    several_backwards,
    sgd,
    two_forwards,
)

AS_OTHERS = (
    compiled,
    compiled_loss,
    plain,
    two_forwards,
    reentrant,
    deepcopied,
    inputs_only,
    full_batch,
    kept_batches,
    large,
)
"""Programs that run with ``-m soak``: the others, or those of test_backward_gradients.py, do what these do and more."""


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "program",
    [pytest.param(one, id=one.__name__, marks=pytest.mark.soak if one in AS_OTHERS else ()) for one in PROGRAMS],
)
def test_the_weights_are_those_of_one_machine(program: Program, world_size: int) -> None:
    check_against_one_process(program, world_size)


@pytest.mark.parametrize("program", [plain, several_backwards, deepcopied], ids=lambda program: program.__name__)
def test_world_1_is_bit_identical(program: Program) -> None:
    def run(session: Session) -> Any:
        result = program(session)
        return [*result, torch.get_rng_state()]

    for found, wanted in zip(run_ranks(1, run)[0], alone(run), strict=True):
        assert torch.equal(found, wanted)


def test_gradients_keep_type_object_and_strides() -> None:
    def run(session: Session) -> Any:
        model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        half = nn.Linear(2, 2).bfloat16()
        image = torch.full((1, 2, 4, 4), float(session.rank))
        model(image).sum().backward()
        first = model.weight.grad
        assert first is not None
        strides = first.stride()
        (model(image).sum() + half(torch.ones(1, 2).bfloat16()).sum()).backward()
        assert model.weight.grad is first
        assert first.stride() == strides == model.weight.stride()
        assert half.weight.grad is not None
        return half.weight.grad.dtype, first.mean().item()

    assert run_ranks(2, run) == [(torch.bfloat16, pytest.approx(4.0))] * 2


def test_a_saved_module_has_the_same_bytes() -> None:
    def run(_: Session) -> Any:
        model = mlp()
        sgd(model, lambda x, y: model(x).sum() * 0 + y.sum() * 0)
        saved = io.BytesIO()
        torch.save(model, saved)
        return type(model).__name__, list(model.state_dict()), list(vars(model)), saved.getvalue()

    expected = alone(run)
    assert run_ranks(2, run) == [expected] * 2


def test_training_in_eval_mode_is_right_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def run(session: Session) -> list[Tensor]:
        model = mlp().eval()
        result = sgd(model, mse(model))
        return [*result, torch.tensor("model.train()" in " ".join(session.said))]

    expected = alone(lambda session: run(session)[:-1])
    for *result, said in run_ranks(2, run):
        assert said
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_an_exception_in_a_backward_leaves_the_next_one_right() -> None:
    def run(session: Session) -> Any:
        model = nn.Linear(1, 1)
        with pytest.raises(RuntimeError, match="grad can be implicitly created"):
            model(torch.ones(2, 1)).backward()
        handle = model.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 1)).backward()
        handle.remove()
        model.zero_grad()
        (model(torch.ones(1, 1)) * session.rank).backward()
        assert model.weight.grad is not None
        return session.backwards.depth, model.weight.grad.item()

    assert run_ranks(2, run) == [(0, 0.5)] * 2
