"""``lagom.extensions.zero.deepspeed.engine_patches``: programs of one process, through DeepSpeed's engine."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.eval_frame import TorchPatcher
from torch.distributions import Distribution
from torch.optim import adam
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import DivergenceError, LagomError
from lagom.extensions.zero.deepspeed.loading import load
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, check_against_one_process, run_ranks

SAMPLES = 43
"""Samples in batches of 8: the last batch has 3, which are uneven shares on 2 ranks."""
Make = Callable[[nn.Module], torch.optim.Optimizer]


def again(*zero_lvl: object) -> Any:
    """A case of the soak: other tests of this file have its level, and level 1 is DeepSpeed's optimizer of level 2."""
    return pytest.param(*zero_lvl, marks=pytest.mark.soak)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Once, and not in every rank that is forked."""
    load("cpu")


@pytest.mark.soak
def test_distributions_check_their_arguments_after_the_import() -> None:
    def program(_: Session) -> list[bool]:
        found = []
        for imports in (lambda: importlib.import_module(f"{COMPILED}.muon_optimizer"), lambda: load("cpu")):
            for name in [name for name in sys.modules if name.startswith(COMPILED)]:
                del sys.modules[name]
            TorchPatcher.patch.cache_clear()  # torch's compiler turns the checks off once in a process
            Distribution.set_default_validate_args(True)
            imports()
            found.append(_checks_arguments())
        return found

    assert run_ranks(1, program, patches=False) == [[False, True]]


COMPILED = "deepspeed.runtime.zero.muon"
"""The package of DeepSpeed that is compiled when it is imported."""


def _checks_arguments() -> bool:
    try:
        torch.distributions.Normal(0.0, -1.0)
    except ValueError:
        return True
    return False


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9), nn.GELU())
        self.head = nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))  # type: ignore[no-any-return]


def _groups(network: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(network, Network)
    groups: list[dict[str, Any]] = [
        {"params": network.inner.parameters()},
        {"params": network.head.parameters(), "lr": 0.05},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda network: torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda network: torch.optim.Adam(network.parameters(), lr=0.01),
    "adamw": _groups,
}


def state_of(network: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in network.state_dict().items()}


def batches(num: int = 32) -> Iterator[torch.Tensor]:
    """Yield batches of 8 of ``num`` samples."""
    yield from (inputs for (inputs,) in DataLoader(TensorDataset(torch.randn(num, 6)), batch_size=8))


def steps(network: nn.Module, optimizer: torch.optim.Optimizer, num: int = 32) -> Iterator[int]:
    """Take a step for each batch, and yield its number."""
    for number, inputs in enumerate(batches(num)):
        network(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield number


def epoch(make: Make, session: Session | None = None, accumulate: int = 1) -> dict[str, Any]:
    """An ordinary program: a scheduler, an uneven last batch, a metric, a state_dict."""
    torch.manual_seed(3)
    x = torch.randn(SAMPLES, 6)
    y = x[:, :2] * 0.7 - x[:, 2:4].tanh()
    network = Network()
    optimizer = make(network)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for number, (inputs, targets) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        loss = nn.functional.mse_loss(network(inputs), targets) / accumulate
        loss.backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    network.eval()
    with torch.no_grad():
        metric = sum(float((network(a) - b).square().sum()) for a, b in DataLoader(TensorDataset(x, y), batch_size=8))
    return {"state": state_of(network), "metric": metric, "lr": scheduler.get_last_lr(), "type": type(network).__name__}


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["type"] == "Network"
    assert found["lr"] == wanted["lr"]
    assert list(found["state"]) == list(wanted["state"])
    for key, value in wanted["state"].items():
        assert torch.allclose(found["state"][key], value, rtol=0, atol=1e-6), key
    assert found["metric"] == pytest.approx(wanted["metric"], rel=1e-5)


@pytest.mark.parametrize("zero_lvl", [again(0), again(1), 2, again(3)])
def test_gradients_are_accumulated_until_the_program_steps(zero_lvl: int) -> None:
    wanted = alone(lambda session: epoch(OPTIMIZERS["adam"], session, accumulate=3))
    rows = run_ranks(
        2,
        lambda session: epoch(OPTIMIZERS["adam"], session, accumulate=3),
        backend="deepspeed",
        zero_lvl=zero_lvl,
    )
    for row in rows:
        _same(row, wanted)


@pytest.mark.skipif(
    "decoupled_weight_decay" not in inspect.signature(adam._single_tensor_adam).parameters,
    reason="with torch 2.6 lagom leaves Adam alone",
)
@pytest.mark.parametrize("zero_lvl", [0, again(1), 2, again(3)])
def test_adam_steps_by_torchs_fused_kernel_where_batches_are_split(
    zero_lvl: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain = adam._single_tensor_adam

    def counted(*args: Any, **options: Any) -> None:
        calls.append(1)
        plain(*args, **options)

    monkeypatch.setattr(adam, "_single_tensor_adam", counted)

    def program(session: Session) -> tuple[dict[str, Any], int]:
        return epoch(OPTIMIZERS["adam"], session), len(calls)

    wanted, num_plain = alone(program)
    assert num_plain == 6
    for found, num in run_ranks(2, program, backend="deepspeed", zero_lvl=zero_lvl, batches="split"):
        _same(found, wanted)
        assert num == 0


def test_programs_that_were_written_for_an_engine_run() -> None:
    """Maggy's loops: ``model.backward(loss)``, ``model.step()``, and an optimizer of the configuration."""

    def program(_: Session) -> dict[str, torch.Tensor]:
        network = Network()
        for inputs in batches():
            loss = network(inputs).square().mean()
            network.backward(loss)  # type: ignore[operator]
            network.step()  # type: ignore[operator]
        return state_of(network)

    def plain(_: Session) -> dict[str, torch.Tensor]:
        network = Network()
        list(steps(network, torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)))
        return state_of(network)

    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}}
    rows = run_ranks(2, program, backend="deepspeed", zero_lvl=2, deepspeed_config=config)
    for key, value in alone(plain).items():
        assert torch.allclose(rows[0][key], value, rtol=0, atol=1e-6), key
        assert torch.equal(rows[0][key], rows[1][key]), key


@pytest.mark.parametrize(  # the test above and the test below have blocks by default
    ("zero_lvl", "config", "tolerance"),
    [
        again(1, {"bf16": {"enabled": True}}, 3e-2),
        again(2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 1e-6),
        again(
            3, {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}, 1e-6
        ),
    ],
)
def test_blocks_of_the_configuration_are_passed_through(
    zero_lvl: int, config: dict[str, Any], tolerance: float
) -> None:
    wanted = alone(lambda session: epoch(OPTIMIZERS["adamw"], session))
    for row in run_ranks(
        2,
        lambda session: epoch(OPTIMIZERS["adamw"], session),
        backend="deepspeed",
        zero_lvl=zero_lvl,
        deepspeed_config=config,
    ):
        for key, value in wanted["state"].items():
            assert torch.allclose(row["state"][key].float(), value, rtol=0, atol=tolerance), key
            assert row["state"][key].dtype == (torch.bfloat16 if "bf16" in config else torch.float32)


def test_accumulation_of_the_configuration_steps_when_it_says() -> None:
    def program(session: Session, accumulate: int = 1) -> torch.Tensor:
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for number, inputs in enumerate(batches()):
            (network(inputs).square().mean() / accumulate).backward()
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
        return network.head.weight.detach().clone()

    wanted = alone(lambda session: program(session, 2))
    config = {"gradient_accumulation_steps": 2}
    for row in run_ranks(2, program, backend="deepspeed", zero_lvl=1, deepspeed_config=config):
        assert torch.allclose(row, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero_lvl", [again(1), 2, again(3)])
def test_weights_that_the_program_loads_or_changes_are_stepped_on(zero_lvl: int) -> None:
    def program(_: Session) -> dict[str, torch.Tensor]:
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        best: dict[str, torch.Tensor] = {}
        for number in steps(network, optimizer):
            if number == 0:
                best = {key: value * 0.5 for key, value in state_of(network).items()}
            if number == 2:
                network.load_state_dict(best)
                if zero_lvl < 3:
                    with torch.no_grad():
                        network.head.bias.clamp_(-0.01, 0.01)
        return state_of(network)

    check_against_one_process(program, atol=1e-6, backend="deepspeed", zero_lvl=zero_lvl)


@pytest.mark.parametrize("zero_lvl", [again(1), 2])
def test_a_step_that_is_not_finite_is_made_and_parameters_are_stepped_in_their_own_memory(zero_lvl: int) -> None:
    """DeepSpeed alone would leave the step out, and step a copy of the parameters."""

    def program(session: Session) -> tuple[torch.Tensor, int]:
        torch.manual_seed(3)
        network = nn.Linear(300, 300, bias=False)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for number in range(2):
            network(torch.ones(4, 300)).sum().mul(float("inf") if number else 1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = network.weight.untyped_storage().data_ptr()
        stepped = optimizer.param_groups[0]["params"][0] if session.world_size > 1 else network.weight
        return network.weight.detach().clone(), stepped.untyped_storage().data_ptr() - own

    wanted, _ = alone(program)
    assert not wanted.isfinite().any()
    for weight, distance in run_ranks(2, program, backend="deepspeed", zero_lvl=zero_lvl):
        assert torch.equal(weight.isfinite(), wanted.isfinite())
        assert distance == 0


def _clips(network: nn.Module, _: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)


def _saves_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state_dict()


def _zeroes(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _closure(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: 0.0)


def _grad(network: nn.Module, _: torch.optim.Optimizer) -> None:
    torch.autograd.grad(network(torch.ones(2, 6)).sum(), list(network.parameters()))


def _second(network: nn.Module, _: torch.optim.Optimizer) -> None:
    torch.optim.SGD(network.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (_clips, "gradient_clipping"),
        again(_saves_state, "backend='torch', where it is whole"),
        again(_zeroes, "throws gradients away"),
        again(_closure, "closure"),
        again(_grad, "torch.autograd.grad"),
        again(_second, "one optimizer for each model"),
    ],
)
def test_what_would_be_wrong_is_an_error(does: Callable[[nn.Module, torch.optim.Optimizer], None], says: str) -> None:
    def program(_: Session) -> str:
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(torch.randn(4, 6)).sum().backward()
        with pytest.raises(LagomError) as caught:
            does(network, optimizer)
        return str(caught.value)

    for text in run_ranks(2, program, backend="deepspeed", zero_lvl=2):
        assert says in text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda network: torch.optim.Adafactor(network.parameters()), "does not step each element by itself"),
        (lambda network: _used(torch.optim.Adam(network.parameters())), "has state already"),
        (lambda network: _second_of(network), "2 optimizers"),
    ],
)
def test_an_optimizer_that_cannot_be_driven_is_refused_before_it_steps(make: Make, says: str) -> None:
    def program(_: Session) -> str:
        network = Network()
        optimizer = make(network)
        with pytest.raises(LagomError) as caught:
            network(torch.randn(4, 6))
        del optimizer
        return str(caught.value)

    for text in run_ranks(2, program, backend="deepspeed", zero_lvl=1):
        assert says in text


def _used(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
    return optimizer


def _second_of(network: nn.Module) -> torch.optim.Optimizer:
    network.other = [torch.optim.SGD(network.parameters(), lr=0.1)]  # type: ignore[assignment]
    return torch.optim.SGD(network.parameters(), lr=0.1)


def test_a_rank_that_asks_alone_for_parts_is_an_error_on_all_and_no_hang() -> None:
    def program(session: Session) -> str:
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        with pytest.raises(DivergenceError) as caught:
            network.state_dict() if session.rank == 0 else network(torch.randn(4, 6))
        return str(caught.value)

    for text in run_ranks(2, program, backend="deepspeed", zero_lvl=3):
        assert "state_dict()" in text
        assert "a forward" in text


@pytest.mark.parametrize(
    ("zero_lvl", "batches", "evaluation"),
    [
        (2, "whole", "gathered"),
        again(3, "whole", "gathered"),
        again(3, "split", "replicated"),
        again(1, "split", "sharded"),
    ],
)
def test_settings_of_batches_and_evaluation_hold(zero_lvl: int, batches: Any, evaluation: Any) -> None:
    wanted = alone(lambda session: epoch(OPTIMIZERS["sgd"], session))
    rows = run_ranks(
        2,
        lambda session: epoch(OPTIMIZERS["sgd"], session),
        backend="deepspeed",
        zero_lvl=zero_lvl,
        batches=batches,
        evaluation=evaluation,
    )
    if evaluation == "sharded":
        assert sum(row["metric"] for row in rows) == pytest.approx(wanted["metric"], rel=1e-5)
    for row in rows:
        _same(row | ({"metric": wanted["metric"]} if evaluation == "sharded" else {}), wanted)


@pytest.mark.parametrize("zero_lvl", [0, again(2), again(3)])
def test_batchnorm_and_bf16_by_flag_are_lagoms(zero_lvl: int) -> None:
    def program(_: Session) -> dict[str, torch.Tensor]:
        network = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        list(steps(network, torch.optim.SGD(network.parameters(), lr=0.1), 20))
        return state_of(network)

    check_against_one_process(program, atol=1e-6, backend="deepspeed", zero_lvl=zero_lvl)
    wanted, _ = run_ranks(2, program, mixed_precision="bf16")
    for found in run_ranks(2, program, backend="deepspeed", zero_lvl=zero_lvl, mixed_precision="bf16"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.soak
def test_a_model_in_parts_is_neither_copied_nor_pickled() -> None:
    def program(_: Session) -> tuple[str, str, nn.Module]:
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        with pytest.raises(LagomError) as copied:
            copy.deepcopy(network)
        with pytest.raises(LagomError) as pickled:
            pickle.dumps(network.head)
        return str(copied.value), str(pickled.value), network

    with pytest.raises(RankFailedError, match="state_dict"):
        run_ranks(2, program, backend="deepspeed", zero_lvl=3)
    texts = run_ranks(2, lambda session: program(session)[:2], backend="deepspeed", zero_lvl=3)
    assert all("state_dict" in text for row in texts for text in row)


def test_without_deepspeed_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(RankFailedError, match=r"pip install 'lagom-spark\[deepspeed\]'"):
        run_ranks(2, lambda _: None, backend="deepspeed", zero_lvl=1)


def test_nvme_without_what_its_op_is_built_of_is_refused_before_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is asked for; DeepSpeed would find out in the first forward."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().get_op_builder("AsyncIOBuilder")
    monkeypatch.setattr(builder, "is_compatible", lambda *_, **__: False)
    for place in ("offload_optimizer", "offload_param"):
        config = {"zero_optimization": {place: {"device": "nvme", "nvme_path": "/tmp"}}}
        with pytest.raises(RankFailedError, match=rf"NVMe \({place}\).*libaio"):
            run_ranks(1, lambda _: pytest.fail("it began"), backend="deepspeed", zero_lvl=3, deepspeed_config=config)


@pytest.mark.soak
def test_nothing_is_compiled_and_no_compiler_is_needed() -> None:
    """DeepSpeed's own sums through shared memory would be; they are left out, as is every op of the configuration."""

    def program(session: Session) -> str:
        os.environ["PATH"] = os.environ["CXX"] = os.environ["CC"] = ""
        epoch(OPTIMIZERS["adam"], session)
        return "trained"

    assert run_ranks(2, program, backend="deepspeed", zero_lvl=2) == ["trained"] * 2


@pytest.mark.parametrize("zero_lvl", [0, again(2), again(3)])
def test_models_one_after_another_and_checkpoints_that_repeat_forwards(zero_lvl: int) -> None:
    def program(_: Session) -> list[dict[str, torch.Tensor]]:
        found = []
        for fold in range(2):
            torch.manual_seed(fold)
            network = Network()
            optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
            for inputs in batches(24):
                inner = torch.utils.checkpoint.checkpoint(network.inner, inputs, use_reentrant=False)
                network.head(inner).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(state_of(network))
        return found

    check_against_one_process(program, atol=1e-6, backend="deepspeed", zero_lvl=zero_lvl)


@pytest.mark.soak
def test_a_rank_that_fails_ends_the_run_with_its_own_error() -> None:
    def train() -> None:
        network = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for number in range(3):
            if number == 2 and lagom.rank() == 1:
                raise KeyError("of rank 1 alone")
            network(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    config = TorchDistributedConfig(launcher="local", world_size=2, backend="deepspeed", zero_lvl=2)
    with pytest.raises(KeyError, match="of rank 1 alone"):
        experiment.lagom(train, config)


@pytest.mark.soak
def test_gradients_of_level_0_are_there_and_are_those_of_all_ranks() -> None:
    def program(_: Session) -> tuple[torch.Tensor, list[float]]:
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        norms = []
        for number, inputs in enumerate(batches(43)):
            network(inputs).square().mean().backward()
            if number % 2:
                norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
        return network.head.weight.detach().clone(), norms

    weight, norms = alone(program)
    for found, seen in run_ranks(2, program, backend="deepspeed"):
        assert torch.allclose(found, weight, rtol=0, atol=1e-6)
        assert seen == pytest.approx(norms, rel=1e-5)


def test_gradients_that_nobody_would_average_are_an_error() -> None:
    def by_hand(network: nn.Module) -> None:
        network(torch.randn(4, 6)).sum().backward()

    def by_function(network: nn.Module) -> None:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        nn.functional.linear(torch.randn(4, 6), network.inner[0].weight).sum().backward()  # type: ignore[index,union-attr]
        optimizer.step()

    def program(session: Session) -> list[str]:
        texts = []
        for does in (by_hand, by_function):
            with pytest.raises(LagomError) as caught:
                does(Network())
            texts.append(str(caught.value))
        x = torch.randn(4, 6, requires_grad=True)  # a rank's own input is no such thing
        frozen = Network().requires_grad_(False)
        frozen(x).sum().backward()
        assert x.grad is not None
        return texts

    for row in run_ranks(2, program, backend="deepspeed", zero_lvl=1):
        assert all("DeepSpeed does not drive" in text for text in row)
