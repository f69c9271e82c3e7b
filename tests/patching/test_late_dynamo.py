"""torch's compiler in ranks: imported when a program compiles, with torch's own functions in its tables."""

from __future__ import annotations

import functools
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.launchers import local
from lagom.patching.replace import originals, replaced


@pytest.fixture(scope="module", autouse=True)
def new_server() -> Iterator[None]:
    """Ranks are forked from a process that has not imported it: what has ranks import it shuts their server down."""
    local.shut_down()
    yield
    local.shut_down()


def run(function: Any, world_size: int = 2, **hparams: Any) -> Any:
    config = TorchDistributedConfig(launcher="local", world_size=world_size, hparams=hparams)
    return experiment.lagom(function, config).per_rank


def train(compiles: bool) -> tuple[list[torch.Tensor], float, bool]:
    """Weights, a loss of an evaluation, and whether Dynamo was imported before the training."""
    warnings.simplefilter("ignore")  # torch.compile warns of its own modules
    was_there = "torch._dynamo.convert_frame" in sys.modules
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    if compiles:
        model.compile(backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(22, 4).double(), torch.randint(3, (22,)))
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    return [tensor.detach().clone() for tensor in model.state_dict().values()], loss, was_there


@pytest.mark.soak
def test_it_is_imported_for_programs_that_compile_and_weights_are_those_of_one_process() -> None:
    from tests.ranks import alone  # imports Dynamo, which the ranks' import of this file must not

    def loads(compiles: bool) -> Any:
        return *train(compiles), "torch._dynamo.convert_frame" in sys.modules

    def plainly(compiles: bool, _: object) -> Any:
        return train(compiles)

    local.shut_down()
    for compiles, before, after in (False, False, False), (True, False, True), (True, True, True):
        weights, loss, _ = alone(partial(plainly, compiles))
        for found, found_loss, was_there, is_there in run(loads, compiles=compiles):
            assert (was_there, is_there) == (before, after)
            assert found_loss == pytest.approx(loss, abs=1e-12)
            for mine, wanted in zip(found, weights, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)
    local.shut_down()


def test_uncompiled_code_does_without_it() -> None:
    def use_torch() -> bool:
        import inspect
        import unittest

        torch.distributed.init_process_group("gloo")
        torch.distributed.destroy_process_group()
        weight = torch.ones(3, requires_grad=True)
        torch.optim.SGD([weight]).load_state_dict(torch.optim.SGD([weight]).state_dict())
        inspect.getmodule(weight)
        with unittest.TestCase().assertWarns(UserWarning):
            warnings.warn("one", UserWarning, stacklevel=1)
        return "torch._dynamo.convert_frame" in sys.modules

    assert run(use_torch) == (False, False)


ONE_OF_EACH_KIND = ("from torch._dynamo.utils import counters; counters", "torch.compiler.disable(len)([])")
"""Statements by which a module is imported, and called through torch; after them an attribute is read."""
OTHERS = (
    *("import torch._dynamo.config; torch._dynamo.config.suppress_errors", "torch._dynamo.config.suppress_errors"),
    *("torch._dynamo.disable(len)([])", "import torch._inductor.config"),
)


@functools.cache
def used(statements: tuple[str, ...]) -> tuple[list[int], int]:
    """Run each of ``statements`` in a fork of a rank, and import it in the rank.

    Returns:
        The forks' statuses, and how many of the rank's files are open afterwards.
    """

    def use(statement: str) -> bool:
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        optimizer.zero_grad()
        exec(statement)
        optimizer.zero_grad()
        function = torch.optim.Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]
        is_disabled = vars(function)["__dynamo_disable"] is not function
        return torch._dynamo is sys.modules["torch._dynamo"] and is_disabled

    def forked(statement: str) -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if use(statement) else 1)
        return pid

    def use_each() -> tuple[list[int], int]:
        assert "torch._dynamo.convert_frame" not in sys.modules
        statuses = [os.waitpid(pid, 0)[1] for pid in map(forked, statements)]
        pipes = [end for _ in range(20) for end in os.pipe()]  # these take all numbers that are free in the rank
        torch._dynamo.reset()
        gc.unfreeze()  # lets go of what the rank was forked with
        gc.collect()
        return statuses, sum(os.fstat(end).st_nlink for end in pipes)

    try:
        ((statuses, num_open),) = run(use_each, world_size=1)
    finally:
        local.shut_down()
    return statuses, num_open


@pytest.mark.parametrize(
    "statements", [ONE_OF_EACH_KIND, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["one of each kind", "others"]
)
def test_whatever_needs_it_gets_it(statements: tuple[str, ...]) -> None:
    assert used(statements)[0] == [0] * len(statements)


def test_a_rank_keeps_its_files_when_it_imports_it() -> None:
    assert used(ONE_OF_EACH_KIND)[1] == 40


def test_public_functions_are_put_back_for_a_while() -> None:
    first: Any = len
    second: Any = sum
    before = nn.functional.relu
    with replaced(nn.functional, "relu", first), replaced(nn.functional, "relu", second):
        with (
            replaced(nn.ReLU, "forward", first),
            replaced(torch.autograd, "_engine_run_backward", first),
            replaced(sys, "breakpointhook", first),
            originals("torch"),
        ):
            assert nn.functional.relu is before
            for left in nn.ReLU.forward, torch.autograd._engine_run_backward, sys.breakpointhook:
                assert left is first
        assert nn.functional.relu is second
    assert nn.functional.relu is before
