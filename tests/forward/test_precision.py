"""``mixed_precision`` gives the results of a handwritten autocast and GradScaler, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import alone, check_against_one_process, run_ranks

Forward = Callable[[nn.Module, Tensor], Tensor]


def _network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


def _loader(size: int = 8) -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 72).reshape(-1, 3)
    return DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=size)


def _train(forward: Forward, model: nn.Module | None = None, epochs: int = 3) -> list[Tensor]:
    model = _network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=10, momentum=0.9)
    for _ in range(epochs):
        for x, y in _loader():
            optimizer.zero_grad()
            (0.01 * nn.functional.mse_loss(forward(model, x), y)).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def _plainly(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


def _by_hand(dtype: torch.dtype) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return _plainly(model, x).float()

    return forward


def test_bf16_in_one_process_is_autocast_by_hand_bit_for_bit() -> None:
    expected = alone(lambda _: _train(_by_hand(torch.bfloat16)))
    assert not all(map(torch.equal, alone(lambda _: _train(_plainly)), expected))
    for asked in ("bf16", True):
        found = run_ranks(1, lambda _: _train(_plainly), mixed_precision=asked)[0]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("asked", "batches"),
    [
        *(("bf16", "whole"), ("fp16", "split")),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in (("bf16", "split"), ("fp16", "whole"))),
    ],
)
def test_ranks_train_as_one_process_does(asked: Any, batches: Any) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[asked]
    expected = alone(lambda _: _with_scaler() if asked == "fp16" else _train(_by_hand(dtype)))
    for found in run_ranks(2, lambda _: _train(_plainly), mixed_precision=asked, batches=batches):
        torch.testing.assert_close(found, expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


def _with_scaler() -> list[Tensor]:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=10, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        for x, y in _loader():
            optimizer.zero_grad()
            # Small enough not to overflow: the skipped steps would depend on a rank's number of samples.
            scaler.scale(0.01 * nn.functional.mse_loss(_by_hand(torch.float16)(model, x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return [p.detach() for p in model.parameters()]


class _Noting(nn.Module):
    """A layer that records the type that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.inside: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = self.layer(x)
        self.inside.append(found.dtype)
        return {"out": found, "more": (found * 2, len(x)), "none": None}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_computes_in_half_and_gives_float32(world_size: int) -> None:
    def run(_: Session) -> Any:
        model = _Noting()
        out = model(torch.ones(2, 3))
        out["out"].sum().backward()
        loss = nn.CrossEntropyLoss()(out["more"][0] @ torch.ones(4, 2), torch.zeros(2, dtype=torch.int64))
        kinds = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters() if p.grad is not None}
        return model.inside[-1], out["out"].dtype, out["more"][0].dtype, out["more"][1], loss.dtype, kinds

    for found in run_ranks(world_size, run, mixed_precision="bf16", always_slices=False):
        assert found == (torch.bfloat16, torch.float32, torch.float32, 2, torch.float32, {torch.float32})


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_modules_of_another_type_are_left_alone(kind: torch.dtype) -> None:
    def run(_: Session) -> Any:
        model = _network().to(kind)
        out = model(torch.ones(2, 3, dtype=kind))
        out.sum().backward()
        return out.detach(), next(model.parameters()).grad

    expected = alone(run)
    for asked in ("bf16", "fp16"):
        found = run_ranks(1, run, mixed_precision=asked)[0]
        assert found[0].dtype is kind
        assert all(map(torch.equal, found, expected))


def test_a_module_may_be_converted_after_its_first_call() -> None:
    def run(_: Session) -> Any:
        model = _network()
        model(torch.ones(2, 3))
        model.bfloat16()
        converted = model(torch.ones(2, 3, dtype=torch.bfloat16)).detach()
        model.float()
        return converted, model(torch.ones(2, 3)).detach()

    expected = alone(run)
    converted, back = run_ranks(1, run, mixed_precision="bf16")[0]
    assert converted.dtype is torch.bfloat16
    assert torch.equal(converted, expected[0])
    assert not torch.equal(back, expected[1])


def _own_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        first = _plainly(model[0], x)  # type: ignore[index]
    return _plainly(model[1:], first.float())  # type: ignore[index]


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_a_program_with_autocast_of_its_own_is_left_alone(asked: Any) -> None:
    expected = alone(lambda _: _train(_own_autocast))
    found = run_ranks(1, lambda session: (_train(_own_autocast), session.said), mixed_precision=asked)[0]
    assert all(map(torch.equal, found[0], expected))
    assert any("uses autocast itself" in said for said in found[1])


def test_fp16_in_one_process_is_a_scaler_by_hand() -> None:
    expected = alone(lambda _: _with_scaler())
    found = run_ranks(1, lambda _: _train(_plainly), mixed_precision="fp16")[0]
    assert all(map(torch.equal, found, expected))


def test_a_program_with_a_scaler_of_its_own_is_left_alone() -> None:
    expected = alone(lambda _: _with_scaler())
    assert all(map(torch.equal, run_ranks(1, lambda _: _with_scaler(), mixed_precision="fp16")[0], expected))
    for found in run_ranks(2, lambda _: _with_scaler(), mixed_precision="fp16"):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_small_gradients_do_not_vanish(world_size: int) -> None:
    def run(_: Session) -> Any:
        model = _network()
        (1e-8 * _plainly(model, torch.ones(2, 3)).sum()).backward()
        return [p.grad for p in model.parameters()]

    check_against_one_process(run, world_size, rtol=2e-3, atol=1e-11, mixed_precision="fp16")


@pytest.mark.parametrize(
    ("world_size", "zero_lvl"), [(1, 0), (2, 0), pytest.param(2, 1, marks=pytest.mark.soak), (2, 2)]
)
def test_a_step_whose_gradients_overflow_is_left_out_on_all_ranks(world_size: int, zero_lvl: int) -> None:
    def run(session: Session) -> Any:
        model = _network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        weights = []
        for factor in (0.01, 1e6, 0.01):
            optimizer.zero_grad()
            # A single rank overflows.
            mine = factor if session.rank == session.world_size - 1 else 0.01
            (mine * _plainly(model, torch.ones(2, 3)).sum()).backward()
            optimizer.step()
            graded = all(p.grad is not None for p in model.parameters())
            weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        return weights, graded, optimizer.state_dict()["state"][0]["step"].item(), session.said

    for (first, second, third), graded, steps, said in run_ranks(
        world_size, run, mixed_precision="fp16", zero_lvl=zero_lvl
    ):
        assert torch.equal(first, second)
        assert third.isfinite().all()
        assert not torch.equal(second, third)
        assert graded
        assert steps == 2
        assert any("Adam leaves the step out" in one for one in said)


def test_hooks_and_what_is_accumulated_have_their_true_size() -> None:
    def run(_: Session) -> Any:
        model = _network()
        seen: list[list[Tensor]] = []
        for p in model.parameters():
            seen.append([])
            p.register_hook(lambda g, mine=seen[-1]: mine.append(g.clone()))
        for _step in range(2):
            _plainly(model, torch.ones(2, 3)).mean().div(8).backward()
        return [g for mine in seen for g in mine] + [p.grad for p in model.parameters()]

    expected = alone(run)
    for world_size in (1, 2):
        for found in run_ranks(world_size, run, mixed_precision="fp16"):
            for one, wanted in zip(found, expected, strict=True):
                assert one.abs().max() < 1
                torch.testing.assert_close(one, wanted, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("asked", [pytest.param("bf16", marks=pytest.mark.soak), "fp16"])
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_checkpoints_repeat_what_they_did(use_reentrant: bool, asked: Any, world_size: int) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _network()
            self.first = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, self.first(x), use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    class Plain(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return _plainly(self.body, self.first(x))

    def run(kind: type[Checkpointed]) -> list[Tensor]:
        torch.manual_seed(1)
        return _train(_plainly, kind(), epochs=1)

    expected = run_ranks(world_size, lambda _: run(Plain), mixed_precision=asked)
    assert not all(map(torch.equal, alone(lambda _: run(Plain)), expected[0]))
    for found, wanted in zip(
        run_ranks(world_size, lambda _: run(Checkpointed), mixed_precision=asked), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
