"""Optimizers that are shared out: what one rank does alone, what ranks do unlike, what comes before and after."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from lagom.errors import LagomError
from lagom.session.session import Session
from tests.extensions.zero.test_zero_steps import Softsign, _loader, _model, _weights, close, same
from tests.ranks import RankFailedError, alone, run_ranks


@pytest.mark.soak
def test_a_state_that_only_one_rank_asks_for() -> None:
    def train(session: Session) -> Any:
        model = _model()
        optimizer, other = Adam(model[0].parameters(), 0.01), Softsign(model[2:].parameters())
        saved = []
        for i in range(4):
            model(torch.ones(4, 7)).square().mean().backward()
            optimizer.step()
            other.step()
            model.zero_grad()
            if session.rank == 0:
                saved.append(copy.deepcopy(optimizer.state_dict()))
            if session.rank == (i if session.world_size > 1 else 0):
                saved.append(copy.deepcopy(other.state_dict()))
        if session.rank == 0:  # the others have ended, and have their optimizers no more
            saved.append(optimizer.state_dict())
        return saved

    wanted = alone(train)
    found = run_ranks(3, train, zero_lvl=1)
    close(found[0], [wanted[i] for i in (0, 1, 2, 4, 6, 8)])
    close([found[1], found[2]], [[wanted[3]], [wanted[5]]])


@pytest.mark.soak
def test_a_step_in_a_hook_and_a_closure_that_looks_at_the_state() -> None:
    def train(_: Session) -> Any:
        model = _model()
        adam = Adam(model.parameters(), 0.01)
        sums = []

        def closure() -> torch.Tensor:
            adam.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 7)).square().sum()
            loss.backward()
            sums.append(sum(float(state["exp_avg"].sum()) for state in adam.state.values()))
            return loss

        for _step in range(3):
            adam.step(closure)

        own = {p: SGD([p], 0.1, momentum=0.5) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            own[p].step()  # type: ignore[index]
            own[p].zero_grad()  # type: ignore[index]

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        for x, y in _loader():
            F.mse_loss(model(x), y).backward()
        for handle in handles:
            handle.remove()
        return _weights(model), sums

    same(train)


@pytest.mark.soak
def test_backwards_that_a_closure_accumulates() -> None:
    """Reading their gradients is an exchange: also for ranks that have nothing to step."""

    def train(_: Session) -> Any:
        tiny = nn.Parameter(torch.ones(3, dtype=torch.float64))  # one rank has it all
        sgd = SGD([tiny], 0.1, momentum=0.9)

        lengths = iter((4, 4, 4, 2, 4, 2))

        def several() -> torch.Tensor:
            sgd.zero_grad()
            for part in torch.arange(12.0).view(4, 3)[: next(lengths)]:
                (tiny * part).square().sum().backward()
            return tiny.detach().sum()

        for _step in range(6):
            sgd.step(several)
        return tiny.detach()

    same(train)


def test_an_optimizer_that_came_before_the_run_or_goes_home_after_it() -> None:
    model = _model()
    torch.set_default_dtype(torch.float32)
    optimizer = Adam(model.parameters(), 0.01)
    sent = pickle.dumps((model, optimizer))

    def train(session: Session) -> Any:
        found = []
        for mine, its in (pickle.loads(sent), (model, optimizer)):
            for _ in range(2):
                its.zero_grad()
                mine(torch.ones(3, 7, dtype=torch.float64)).square().mean().backward()
                its.step()
            found.append((_weights(mine), its))
        session.kept = found  # type: ignore[attr-defined]  # alive when the run ends
        return [weights for weights, _ in found]

    def home(session: Session) -> Any:
        weights = train(session)
        return weights, _AtEnd(session)

    wanted = alone(lambda session: (train(session), [its.state_dict() for _, its in session.kept]))  # type: ignore[attr-defined]
    for weights, states in run_ranks(2, home, zero_lvl=1):
        close((weights, states), wanted)


class _AtEnd:
    """Pickled when the run has ended: the states that the kept optimizers have then."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __reduce__(self) -> Any:
        states = [its.state_dict() for _, its in self._session.kept]  # type: ignore[attr-defined]
        return list, (states,)


def test_gradients_that_differ_are_an_error_that_names_the_parameter() -> None:
    def train(session: Session) -> None:
        model = _model()
        optimizer = SGD(model.parameters(), 0.1)
        model(torch.ones(2, 7)).mean().backward()
        model[2].weight.grad.add_(session.rank)  # type: ignore[union-attr, operator]
        optimizer.step()

    with pytest.raises(RankFailedError, match=r"Sequential\.2\.weight .* has other gradients on other ranks"):
        run_ranks(2, train, zero_lvl=1)


def test_values_that_differ_and_that_no_backward_compared_are_an_error() -> None:
    def train(session: Session) -> None:
        p = nn.Parameter(torch.ones(300) * session.rank)
        p.grad = torch.ones(300)
        SGD([p], 0.1).step()

    with pytest.raises(RankFailedError, match="parameters that differ"):
        run_ranks(2, train, zero_lvl=1)


def test_ranks_that_step_other_optimizers_get_an_error() -> None:
    def train(session: Session) -> None:
        model = _model()
        optimizers = [SGD(model.parameters(), 0.1), Adam(model.parameters(), 0.1)]
        for optimizer in optimizers:
            model(torch.ones(2, 7)).mean().backward()
            optimizer.step()
        optimizers[session.rank].step()

    with pytest.raises(RankFailedError, match="step different optimizers"):
        run_ranks(2, train, zero_lvl=1)


@pytest.mark.soak  # tests/gradients/test_divergence.py has a rank that is at its end
def test_a_rank_that_steps_alone_gets_an_error() -> None:
    def train(session: Session) -> None:
        model = _model()
        optimizer = SGD(model.parameters(), 0.1)
        for i in range(2):
            model(torch.ones(2, 7)).mean().backward()
            if i == 0 or session.rank == 0:
                optimizer.step()

    with pytest.raises(RankFailedError, match=r"rank 0 at optimizer.step\(\), rank 1 at the end of the program"):
        run_ranks(2, train, zero_lvl=1)


def test_in_another_thread_or_process_there_is_no_state_and_no_step() -> None:
    def train(session: Session) -> Any:
        model = _model()
        optimizer = Adam(model.parameters(), 0.01)
        model(torch.ones(2, 7)).mean().backward()
        optimizer.step()
        errors: list[str] = []

        def attempt(call: Callable[[], object]) -> None:
            try:
                call()
            except LagomError as error:
                errors.append(str(error))

        for call in (optimizer.state_dict, lambda: len(optimizer.state), optimizer.step):
            thread = threading.Thread(target=attempt, args=(call,))
            thread.start()
            thread.join()
        session.live = False  # as in a process that is forked
        with pytest.raises(LagomError, match="shared out over the ranks"):
            optimizer.state_dict()
        session.live = True
        return errors, len(optimizer.state_dict()["state"])

    for errors, num_states in run_ranks(2, train, zero_lvl=1):
        assert ["shared out" in error or "in a thread" in error for error in errors] == [True] * 3
        assert num_states == 6


@pytest.mark.parametrize("zero_lvl", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_learning_rate_of_a_ranks_own_is_an_error(zero_lvl: int) -> None:
    """Parameters would be equal on all ranks, each rank's part of them stepped by another rate: nobody would see it."""

    def train(session: Session) -> None:
        model = _model()
        groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2:].parameters()}]
        optimizer = SGD(groups, 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for i in range(6):
            model(torch.ones(4, 7)).square().mean().backward()
            optimizer.step()
            plateau.step(i if session.rank == 1 and i > 2 else -i)

    with pytest.raises(RankFailedError, match=r"'lr' of .* group 0 is 0\.1 on rank 0, 0\.05 on rank 1\. .*'whole'"):
        run_ranks(2, train, zero_lvl=zero_lvl)
