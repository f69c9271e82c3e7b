"""Compares ``plan_memory`` with the memory that ranks hold."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import lagom
from lagom.available_memory import available_memory, cgroup_limits
from lagom.extensions.zero.memory_plan.activations import activations, by_steps
from lagom.extensions.zero.memory_plan.memory_planner import plan_memory
from lagom.extensions.zero.memory_plan.needs import MemoryPlan
from lagom.run_state.memory_layout import storage_of
from lagom.session.session import Session
from tests.ranks import run_ranks

WIDTH = 256


class Network(nn.Module):
    """A tied, a frozen and some ordinary parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(self.inner(self.embed(x)))))  # type: ignore[no-any-return]


class Signs(torch.optim.Optimizer):
    """A third party's: two states of a parameter's shape, one of them in half precision, and a count."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["last"] = torch.zeros_like(p, dtype=torch.float16)
                    state["count"] = torch.zeros(())
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                state["last"].copy_(p.grad)
                p.add_(state["mean"].sign(), alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adafactor": torch.optim.Adafactor,
    "signs": Signs,
}


@pytest.mark.parametrize(
    ("name", "zero_lvl"),
    [
        ("adam", 3),
        *(pytest.param("adam", level, marks=pytest.mark.soak) for level in (0, 1, 2)),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in (("adafactor", 2), ("signs", 3))),
    ],
)
def test_ranks_hold_what_was_planned(name: str, zero_lvl: int) -> None:
    plan = plan_memory(Network, optimizer=OPTIMIZERS[name], world_size=2)
    held = run_ranks(2, functools.partial(_held, OPTIMIZERS[name]), zero_lvl=zero_lvl)
    assert max(held) == pytest.approx(plan.levels[zero_lvl].held, rel=0.01)


@pytest.mark.soak
def test_an_optimizer_that_is_there_already_counts_as_its_class() -> None:
    network = Network()
    optimizer = torch.optim.Adam(network.parameters())
    before = {name: (id(value), value.clone()) for name, value in network.state_dict(keep_vars=True).items()}
    planned = plan_memory(network, optimizer=optimizer, world_size=3)
    assert planned.levels == plan_memory(Network, world_size=3).levels
    assert not optimizer.state
    for name, value in network.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])
        assert value.grad is None
    network(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    assert plan_memory(network, optimizer=optimizer, world_size=3).levels == planned.levels


def test_formulas_hold_for_a_model_that_no_machine_has_room_for() -> None:
    many = 40
    plan = plan_memory(
        lambda: nn.Sequential(*(nn.Linear(50_000, 50_000, bias=False) for _ in range(many))), world_size=8
    )
    count = many * 50_000**2
    found = [level.held / count for level in plan.levels]
    assert found == pytest.approx([16, 8 + 1, 4 + 12 / 8, 16 / 8], rel=1e-6)
    assert plan.zero_lvl is None
    assert "nothing fits" in repr(plan)


def test_the_lowest_level_that_leaves_room_is_named() -> None:
    network = nn.Linear(1000, 1000, bias=False)
    for memory, level in ((21e6, 0), (16e6, 1), (13e6, 2)):
        plan = plan_memory(network, world_size=2, memory=int(memory))
        assert plan.zero_lvl == level
        assert f"zero_lvl={level} fits" in repr(plan)
        assert f"zero_lvl={level} fits" in plan._repr_html_()


def test_a_state_that_is_no_tensor_of_the_parameters_shape_is_counted() -> None:
    plan = plan_memory(lambda: nn.Linear(300, 200, bias=False), optimizer=torch.optim.Adafactor, world_size=2)
    network = nn.Linear(300, 200, bias=False)
    optimizer = torch.optim.Adafactor(network.parameters())
    network(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert plan.levels[0].state == held
    assert plan.shared_out == "by whole parameter"


def test_a_level_that_the_optimizer_cannot_have_does_not_fit() -> None:
    plan = plan_memory(lambda: nn.Linear(300, 200), optimizer=torch.optim.Adafactor, world_size=2, memory=10)
    assert [level.possible for level in plan.levels] == [True, True, True, False]
    assert "not with Adafactor" in repr(plan)


def test_lbfgs_keeps_its_history_whole_on_every_rank() -> None:
    network = nn.Linear(64, 64)
    make = functools.partial(torch.optim.LBFGS, history_size=4, max_iter=30, tolerance_change=0, tolerance_grad=0)
    plan = plan_memory(network, optimizer=make, world_size=2)
    optimizer = make(network.parameters())
    x = torch.randn(64, 64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (network(x) - x.cos()).pow(4).mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    optimizer.step(closure)
    (state,) = optimizer.state.values()
    tensors = [one for value in state.values() for one in (value if isinstance(value, list) else [value])]
    held = sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor) and one.dim())
    assert plan.levels[2].state == plan.levels[0].state == held
    assert plan.shared_out == "not at all"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("mlp", None), ("cnn", None), ("transformer", torch.bfloat16), ("lstm", torch.bfloat16)),
        *(pytest.param(name, torch.bfloat16, marks=pytest.mark.soak) for name in ("mlp", "cnn")),
        *(pytest.param(name, None, marks=pytest.mark.soak) for name in ("transformer", "lstm")),
    ],
)
def test_activations_are_what_autograd_saves(name: str, dtype: torch.dtype | None) -> None:
    module, batch = _case(name)
    planned = activations(module, batch, 1, dtype)
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, by_steps(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        outputs = module(batch)
    note(batch)
    for output in outputs if name == "lstm" else (outputs,):
        if isinstance(output, torch.Tensor):
            note(output)
    assert planned.num_samples == len(batch)
    # The kernels that the processor has for an LSTM or for attention may save some more than what shapes tell.
    real = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    assert planned.num_bytes == pytest.approx(real, rel=0.03 if name == "lstm" else 0.001)


def test_a_rank_has_its_share_of_the_activations() -> None:
    network = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
    whole = plan_memory(network, batch=torch.zeros(32, 64), world_size=1)
    third = plan_memory(network, batch=torch.zeros(32, 64, device="meta"), world_size=3)
    assert whole.activations is not None
    assert third.num_samples == 11
    assert third.activations == whole.activations * 11 // 32
    assert whole.needed(0) == whole.levels[0].held + whole.activations


def test_nothing_of_the_module_changes_and_no_random_number_is_drawn() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    before, state = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()
    plan_memory(network, batch=torch.randn(4, 8, generator=torch.Generator()), world_size=2)
    plan_memory(lambda: nn.Linear(3, 3), world_size=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert not network.training


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: plan_memory(nn.Linear, world_size=1), "functools.partial"),  # type: ignore[arg-type]
        (lambda: plan_memory(lambda: 3, world_size=1), "want a torch.nn.Module"),  # type: ignore[arg-type,return-value]
        (lambda: plan_memory(nn.LazyLinear(3), world_size=1), "call the module once"),
        (lambda: plan_memory(nn.Linear(2, 2), optimizer=torch.optim.Adam([torch.zeros(3)]), world_size=1), r"\(3,\)"),
        (lambda: plan_memory(nn.Linear(2, 2), optimizer=lambda p, lr: None, world_size=1), "a function of them"),  # type: ignore[arg-type,misc]
        (lambda: plan_memory(nn.Linear(2, 2), batch=torch.zeros(3, 5), world_size=1), "batch is what the module"),
        (lambda: plan_memory(nn.Linear(2, 2), world_size=0), "world_size is 0"),
        (lambda: plan_memory(nn.Linear(2, 2), world_size=1, memory=-1), "memory is -1"),
        (lambda: plan_memory(nn.Linear(2, 2), world_size=1, mixed_precision="half"), "mixed_precision"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_planned_says_why(make: Callable[[], MemoryPlan], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_limits_of_control_groups_hold_from_the_innermost_out(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/memory.max").write_text("1000\n")
    (tmp_path / "a/b/memory.max").write_text("max\n")
    assert cgroup_limits(tmp_path, own) == [1000]
    own.write_text("5:cpu,memory:/a\n3:cpu:/x\n")
    (tmp_path / "memory/a").mkdir(parents=True)
    (tmp_path / "memory/a/memory.limit_in_bytes").write_text("77")
    (tmp_path / "memory/memory.limit_in_bytes").write_text(str(1 << 62))
    assert cgroup_limits(tmp_path, own) == [77]


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert available_memory(4).num_bytes == available_memory(1).num_bytes // 4


def test_it_is_a_public_name() -> None:
    assert lagom.plan_memory is plan_memory
    assert lagom.MemoryPlan is MemoryPlan


def _held(make: Callable[[Any], torch.optim.Optimizer], session: Session) -> int:
    """Bytes of all tensors that came alive since the module was made, after the third backward."""
    gc.collect()
    known = {storage_of(one).data_ptr() for one in _alive()}
    network = Network()
    optimizer = make(network.parameters())
    x = torch.randn(4, WIDTH)
    for number in range(3):
        optimizer.zero_grad()
        network(x).square().mean().backward()
        if number < 2:
            optimizer.step()
    gc.collect()
    slot: Any = vars(torch._C.TensorBase)["grad"]
    gradients = [gradient for p in network.parameters() if (gradient := slot.__get__(p)) is not None]
    sizes: dict[int, int] = {}
    for one in [*_alive(), *gradients]:
        storage = storage_of(one)
        if storage.data_ptr() not in known and one is not x:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _alive() -> list[torch.Tensor]:
    # Not those without memory, which planning makes, and ranks may inherit.
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and type(one) is not FakeTensor]
    return [one for one in found if one.layout == torch.strided and one.device.type == "cpu" and one.numel() > 8]


def _case(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name == "mlp":
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10)), torch.randn(16, 64)
    if name == "cnn":
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10))
        return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)
    if name == "lstm":
        return nn.LSTM(16, 32, batch_first=True), torch.randn(4, 10, 16)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 10, 32)


def test_memory_is_a_whole_number_of_bytes_also_with_an_exponent() -> None:
    assert plan_memory(nn.Linear(2, 2), memory=40e6, world_size=2).memory == 40_000_000
    for wrong in (40.5, 0.0, float("inf"), float("nan"), True):
        with pytest.raises(ValueError, match=r"memory is .*; want a whole number of bytes, at least 1"):
            plan_memory(nn.Linear(2, 2), memory=wrong, world_size=2)
