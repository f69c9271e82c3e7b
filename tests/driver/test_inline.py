"""``lagom.driver.inline``: one rank in this very process, and everything as it was afterwards."""

from __future__ import annotations

import os
import random
import sys
import threading
import traceback
from typing import Any

import numpy as np
import pytest
import torch

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import PlanError
from lagom.result import Result

pytestmark = pytest.mark.usefixtures("rng_untouched")


def run(function: Any, **settings: Any) -> Result:
    return experiment.lagom(function, TorchDistributedConfig(launcher="inline", **settings))


def test_the_function_runs_in_this_process_and_thread() -> None:
    found = run(lambda: (os.getpid(), threading.get_ident())).value
    assert found == (os.getpid(), threading.get_ident())


def test_nothing_is_pickled_on_the_way_there_or_back() -> None:
    lock = threading.Lock()
    module, data = (lambda: lock), [lock]
    result = run(lambda module, train_set: (module, train_set, lock), module=module, train_set=data)
    assert result.value[0] is module
    assert result.value[1] is data
    assert result.value[2] is lock
    assert result.world_size == 1


def test_the_generators_start_from_the_seed_and_are_put_back() -> None:
    def draw() -> Any:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    torch_state, numpy_state, random_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    expected = draw()
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(random_state)
    assert run(draw, seed=7).value == expected


def test_without_a_seed_the_generators_go_on_as_in_a_plain_call() -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = [draw() for _ in range(3)]
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    assert [run(draw).value, run(draw).value, draw()] == expected
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def test_the_environment_is_put_back_after_success_and_failure() -> None:
    before = dict(os.environ)

    def train(fail: bool) -> None:
        os.environ["LAGOM_TEST"] = "1"
        del os.environ["PATH"]
        if fail:
            raise ValueError("on purpose")

    run(train, hparams={"fail": False})
    assert dict(os.environ) == before
    with pytest.raises(ValueError, match="on purpose"):
        run(train, hparams={"fail": True})
    assert dict(os.environ) == before


def test_an_exception_climbs_as_it_is_with_its_own_traceback() -> None:
    error = KeyError("lr")

    def train() -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        run(train)
    assert raised.value is error
    assert raised.value.__cause__ is None
    assert traceback.extract_tb(raised.tb)[-1].name == "train"
    assert traceback.extract_tb(raised.tb)[-1].line == "raise error"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exits_and_interrupts_climb_too(error: BaseException) -> None:
    def train() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run(train)
    assert raised.value is error
    assert run(lambda: 1).value == 1


def test_a_breakpoint_stops_in_the_users_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[tuple[str, dict[str, Any]]] = []

    def hook() -> None:
        frame = sys._getframe(1)
        stops.append((frame.f_code.co_name, dict(frame.f_locals)))

    monkeypatch.setattr(sys, "breakpointhook", hook)

    def train(lr: float) -> None:
        loss = lr * 2
        breakpoint()
        del loss

    run(train, hparams={"lr": 0.5})
    assert stops == [("train", {"lr": 0.5, "loss": 1.0})]


def test_prints_go_where_this_process_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run(lambda: print("hello"))
    assert capsys.readouterr().out == "hello\n"


def test_lagom_answers_as_in_a_plain_call() -> None:
    assert run(lambda: (lagom.rank(), lagom.world_size())).value == (0, 1)


def test_the_number_of_threads_is_left_alone() -> None:
    before = torch.get_num_threads()
    assert run(lambda: torch.get_num_threads()).value == before


def test_training_gives_the_bits_of_a_plain_run() -> None:
    x = torch.arange(40.0).reshape(10, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    def train() -> torch.Tensor:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(2):
            for inputs, targets in torch.utils.data.DataLoader(data, batch_size=3, shuffle=True):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    state = torch.get_rng_state()
    plain = train()
    torch.set_rng_state(state)
    assert torch.equal(run(train, seed=0).value, plain)


def test_a_call_inside_a_call_works() -> None:
    assert run(lambda: run(lambda: 3).value + 1).value == 4


def test_a_second_thread_is_refused_while_one_runs() -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        leave.wait(20)

    thread = threading.Thread(target=lambda: run(wait))
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(PlanError, match="another thread"):
            run(lambda: None)
    finally:
        leave.set()
        thread.join()
    assert run(lambda: 3).value == 3


def test_a_traceback_says_where_the_program_was_interrupted() -> None:
    def train() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(train)
    assert [entry.name for entry in caught.traceback][-1] == "train"
