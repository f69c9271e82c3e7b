"""``lagom.gradients.divergence``: ranks that drift apart are found out, and buffers follow rank 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import DivergenceError
from lagom.gradients.checksum import checksums, sum_of_bits
from lagom.session.session import Session
from tests.ranks import RankFailedError, run_ranks


def loader(count: int = 64, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 2)), batch_size=batch_size)


def gradient_by_torch_func(model: nn.Module, parameters: dict[str, Any], x: Tensor) -> dict[str, Tensor]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, (x,))
        return output.square().sum()

    found: dict[str, Tensor] = torch.func.grad(loss)(parameters)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_updates_by_torch_func_are_an_error_that_names_the_parameter(world_size: int) -> None:
    def run(_: Session) -> str:
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        try:
            for (x,) in loader():
                gradients = gradient_by_torch_func(model, trained, x)
                for name, p in trained.items():
                    p.data.sub_(gradients[name], alpha=0.1)
        except DivergenceError as error:
            return str(error)
        return ""

    for text in run_ranks(world_size, run):
        assert "Sequential.2.weight of shape (1, 3)" in text
        assert "not from torch.func.grad" in text


def test_updates_by_torch_func_without_another_batch_are_found_at_the_end() -> None:
    def run(_: Session) -> None:
        model = nn.Linear(2, 1)
        (x,) = next(iter(loader()))
        model.weight.data.sub_(gradient_by_torch_func(model, dict(model.named_parameters()), x)["weight"])

    with pytest.raises(RankFailedError, match=r"a tensor of shape \(1, 2\) no longer has the same"):
        run_ranks(2, run)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("by_data", [pytest.param(True, marks=pytest.mark.soak), False])  # a test above has it
def test_updates_by_torch_func_are_an_error(world_size: int, by_data: bool) -> None:
    def run(_: Session) -> str:
        model = nn.Linear(2, 1)
        gradient = torch.func.grad(lambda weights, x: torch.func.functional_call(model, weights, (x,)).square().sum())
        try:
            for (x,) in loader():
                gradients = gradient({name: p.detach() for name, p in model.named_parameters()}, x)
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        (p.data if by_data else p).sub_(gradients[name], alpha=0.1)
        except DivergenceError as error:
            return str(error)
        return ""

    for text in run_ranks(world_size, run):
        assert "Linear.weight of shape (1, 2) no longer" in text


@pytest.mark.parametrize("hidden", [3, pytest.param(300, marks=pytest.mark.soak)])
def test_a_parameter_that_drifts_later_is_an_error_within_100_backwards(hidden: int) -> None:
    def run(session: Session) -> Any:
        last = nn.Linear(hidden, 1)
        model = nn.Sequential(nn.Linear(2, hidden), last)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(1000):
            optimizer.zero_grad()
            try:
                model(torch.ones(4, 2)).square().mean().backward()
            except DivergenceError as error:
                return step, str(error)
            optimizer.step()
            if step == 130 and session.rank == 1:
                last.bias.data[0] += 1e-6
        return None

    for step, text in run_ranks(2, run):
        assert 130 < step <= 230
        assert "Sequential.1.bias of shape (1,) no longer" in text


def test_a_batchnorm_buffer_that_differs_is_an_error() -> None:
    def run(session: Session) -> str:
        norm = nn.BatchNorm1d(2)
        model = nn.Sequential(norm, nn.Linear(2, 1))
        try:
            for (x,) in loader():
                model(x).square().mean().backward()
                if session.rank == 0:
                    assert norm.running_var is not None
                    norm.running_var.data[1] += 1
        except DivergenceError as error:
            return str(error)
        return ""

    for text in run_ranks(2, run):
        assert "the buffer Sequential.0.running_var no longer" in text


class Scaled(nn.Module):
    """Keeps a mean of its inputs, in one of the ways in which programs do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(2))
        self.mean: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        new = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.training:
            self.count += 1
            if self.way == "in place":
                self.mean.copy_(new)
            elif self.way == "assigned":
                self.mean = new
            else:
                self.mean.data.copy_(new)
        result: Tensor = self.linear(x - self.mean)
        return result


@pytest.mark.parametrize("way", ["in place", "assigned", "by data"])
def test_buffers_that_forwards_change_are_rank_0s_after_a_backward(way: str) -> None:
    def run(session: Session) -> Any:
        model = Scaled(way)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        means = []
        for (x,) in loader(62):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            means.append(model.mean.clone())
        return torch.stack(means), model.count, model.mask

    results = run_ranks(3, run)
    assert results[0][1] == 16
    for means, count, mask in results:
        settled = 1 if way == "by data" else 0  # until the first check that sees it
        assert torch.equal(means[settled:], results[0][0][settled:])
        assert count == 16
        assert mask.all()


def test_buffers_are_broadcast_only_when_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> list[int]:
        assert session.group is not None
        model, sent = Scaled("in place").eval(), []
        broadcast = session.group.broadcast

        def noted(tensor: Tensor, root: int = 0) -> None:
            sent.append(tensor.numel())
            broadcast(tensor, root)

        monkeypatch.setattr(session.group, "broadcast", noted)
        for _ in range(5):
            model(torch.ones(4, 2)).square().mean().backward()
        model.train()
        model(torch.ones(4, 2)).square().mean().backward()
        return sent

    assert run_ranks(2, run) == [[25 + 8 + 8, 8 + 8]] * 2


def test_a_graph_that_is_kept_survives_a_broadcast() -> None:
    def run(_: Session) -> None:
        model = Scaled("in place")
        for (x,) in loader(8):
            loss = (model.linear(x) * model.mean).sum()
            model(x).sum().backward(retain_graph=True)
            assert loss.isfinite()

    run_ranks(2, run)


def test_parameters_that_no_backward_reached_may_differ() -> None:
    def run(session: Session) -> None:
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        other.weight.data.fill_(session.rank)
        for (x,) in loader():
            model(x).sum().backward()

    run_ranks(2, run)


def test_a_rank_that_changes_its_model_after_training_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def run(session: Session) -> int:
        model = nn.Linear(2, 1)
        for (x,) in loader():
            model(x).sum().backward()
        if session.rank == 0:
            model.half()
        return 7

    assert run_ranks(2, run) == [7, 7]


def test_ranks_at_different_points_of_the_program_are_an_error() -> None:
    def run(session: Session) -> None:
        model = nn.Linear(2, 1)
        model(torch.ones(1, 2)).sum().backward()
        if session.rank == 1:
            model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankFailedError, match="rank 0 at the end of the program, rank 1 at a backward"):
        run_ranks(2, run)


def test_gradients_have_the_same_bits_on_all_ranks() -> None:
    def run(_: Session) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(2, 100), nn.Linear(100, 100), nn.Linear(100, 300)).to(torch.float32)
        for (x,) in loader(14):
            model(x).sin().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    first, *others = run_ranks(3, run)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_sum_of_bits_tells_any_one_difference() -> None:
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
        for count in (1, 3, 8, 1001):
            plain = torch.ones(count, dtype=kind)
            other = plain.clone()
            other[-1] = 0
            assert sum_of_bits(plain) == sum_of_bits(plain.clone())
            assert sum_of_bits(plain) != sum_of_bits(other)
    grid = torch.arange(12.0).view(3, 4)
    assert sum_of_bits(grid.t()) == sum_of_bits(grid.t().contiguous())
    assert sum_of_bits(torch.arange(9.0)[1:4]) == sum_of_bits(torch.arange(1.0, 4.0))
    assert sum_of_bits(torch.empty(0)) == 0
    assert sum_of_bits(torch.tensor(-0.0)) != sum_of_bits(torch.tensor(0.0))
    assert checksums({}) == {}
    assert checksums({"a": torch.ones(2)})["a"][0] == "torch.float32 (2,)"
