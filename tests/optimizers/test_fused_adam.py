"""``lagom.optimizers.fused_adam``: torch's Adam by its fused kernel, and torch itself where the kernel would differ."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, NAdam, RAdam
from torch.optim import adam as torch_adam

from lagom.optimizers.fused_adam import fused_adam
from lagom.patching.replace import replaced
from lagom.session.session import Session
from tests.ranks import alone, run_ranks

pytestmark = pytest.mark.skipif(
    "decoupled_weight_decay" not in inspect.signature(torch_adam._single_tensor_adam).parameters,
    reason="torch 2.6 has another function for AdamW, and lagom leaves its Adam alone",
)
SHAPES = [(8, 3), (8,), (), (3, 2, 5)]


@contextmanager
def torchs_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list that gets the number of parameters of each call of torch's own ``_single_tensor_adam``."""
    found: list[int] = []
    original = torch_adam._single_tensor_adam

    def counted(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        found.append(len(params))
        original(params, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch_adam, "_single_tensor_adam", counted)
        yield found


def trained(
    kind: type, dtype: torch.dtype, options: dict[str, Any], num_steps: int = 5, *, transposed: bool = True
) -> list[Tensor]:
    """Return the parameters, and all of the optimizer's state, after steps by made gradients."""
    draws = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in SHAPES]
    if transposed:
        parameters.append(nn.Parameter(torch.randn(4, 6, generator=draws).to(dtype).t()))
    optimizer = kind(parameters, **{"lr": 0.01, **options})
    for number in range(num_steps):
        for index, parameter in enumerate(parameters):
            late = index == 1 and number < 2  # its step count differs from the others'
            parameter.grad = None if late else torch.randn(parameter.shape, generator=draws).to(dtype)
        optimizer.step()
    state = [tensor for one in parameters for tensor in optimizer.state[one].values()]
    return [*(one.detach() for one in parameters), *state]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-3}, {"lr": 1}], ids=str)
def test_fused_steps_differ_by_rounding(
    kind: type, options: dict[str, Any], dtype: torch.dtype, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(kind, dtype, options, transposed=False)
    with torchs_calls(monkeypatch) as calls, fused_adam():
        found = trained(kind, dtype, options, transposed=False)
    assert not calls
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


def test_a_fused_step_leaves_other_strides_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(Adam, torch.float64, {})
    with torchs_calls(monkeypatch) as calls, fused_adam():
        found = trained(Adam, torch.float64, {})
    assert len(calls) == 5
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fused_steps_of_parameters_that_share_memory_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepped(overlapping())
    with torchs_calls(monkeypatch) as calls, fused_adam():
        found = stepped(overlapping())
    assert not calls
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_fused_step_leaves_parameters_of_two_types_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]

    with torchs_calls(monkeypatch) as calls, fused_adam():
        found = stepped(mixed())
    assert calls == [2, 2, 2]
    assert all(torch.equal(a, b) for a, b in zip(found, stepped(mixed()), strict=True))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(0.01)}], ids=str)
def test_rare_options_are_left_to_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(Adam, torch.float64, options)
    with torchs_calls(monkeypatch) as calls, fused_adam():
        found = trained(Adam, torch.float64, options)
    assert len(calls) == 5
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def stepped(parameters: list[nn.Parameter], kind: type = Adam) -> list[Tensor]:
    optimizer = kind(parameters, lr=0.1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def overlapping() -> list[nn.Parameter]:
    """Return two parameters with common elements: Adam in torch ends the first before it begins the second."""
    memory = torch.arange(6.0)
    return [nn.Parameter(memory[:4]), nn.Parameter(memory[2:])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_types_are_left_to_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with torchs_calls(monkeypatch) as calls, fused_adam():
        stepped([nn.Parameter(torch.zeros(3, dtype=dtype))])
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("kind", [NAdam, RAdam])
def test_other_optimizers_step_as_before(kind: type) -> None:
    expected = stepped([nn.Parameter(torch.arange(3.0))], kind)
    with fused_adam():
        found = stepped([nn.Parameter(torch.arange(3.0))], kind)
    assert torch.equal(found[0], expected[0])


def test_an_optimizer_without_gradients_steps() -> None:
    with fused_adam():
        Adam([nn.Parameter(torch.zeros(2))]).step()
        Adam([nn.Parameter(torch.zeros(0))]).step()


@pytest.mark.parametrize("slices", [True, False])
def test_whole_batches_step_by_the_kernel_once_a_forward_is_split(slices: bool) -> None:
    """Until then weights have the bits of one process."""

    def program(_: Session) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = Adam(model.parameters(), lr=0.01)
        calls: list[None] = []
        fused = torch._fused_adam_

        def counted(*args: Any, **kwargs: Any) -> None:
            calls.append(None)
            fused(*args, **kwargs)

        with replaced(torch, "_fused_adam_", counted):
            for _step in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
        return [one.detach() for one in model.parameters()], len(calls)

    wanted, _ = alone(program)
    for found, num_calls in run_ranks(2, program, batches="whole", always_slices=slices):
        assert num_calls == (5 if slices else 0)
        rounding = 1e-12 if slices else 0
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)


def compiled_steps(_: Session) -> list[float]:
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
    parameter = nn.Parameter(torch.arange(3.0))
    optimizer = Adam([parameter], lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _step in range(3):
        parameter.grad = torch.ones_like(parameter)
        step()
    return parameter.tolist()


@pytest.mark.soak
def test_a_compiled_step_has_the_bits_of_a_plain_one() -> None:
    assert run_ranks(2, compiled_steps) == [alone(compiled_steps)] * 2
