"""``zero_lvl=3``: each rank has a part of the parameters, and a program sees them whole."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from lagom.errors import DivergenceError, LagomError
from lagom.extensions.zero.parameters import residency, shards, state_dict
from lagom.extensions.zero.parameters.shards import ParameterShards
from lagom.on_rank.oom_report import held_memory
from lagom.run_state.memory_layout import storage_of
from lagom.session.session import Session
from tests.extensions.zero.test_zero_steps import OPTIMIZERS, close, same, trained
from tests.ranks import RankFailedError, alone, run_ranks

LEVEL = 3


@pytest.fixture(autouse=True)
def everything_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small parameters too, and nothing is kept whole for the next use."""
    monkeypatch.setattr(shards, "MIN_ELEMENTS", 2)
    monkeypatch.setattr(residency, "ROOM", 0)
    monkeypatch.setattr(residency, "SHARE_KEPT", 1 << 40)
    yield
    torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    """Parameters of every kind: tied, looked up, recurrent, convolved, and one that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded = nn.Embedding(11, 24)
        self.place = nn.Parameter(torch.randn(5, 24) * 0.1)
        layer = nn.TransformerEncoderLayer(24, 2, 32, 0.0, batch_first=True)
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])
        self.recurrent = nn.LSTM(24, 16, batch_first=True)
        self.convolved = nn.Conv1d(16, 24, 3, padding=1)
        self.norm = nn.LayerNorm(24)
        self.scale = nn.Parameter(torch.ones(1, 8))  # too small for more than one rank

    def forward(self, tokens: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.embedded(tokens) + self.place
        for layer in self.layers:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        x = self.convolved(self.recurrent(x)[0].transpose(1, 2)).transpose(1, 2)
        return F.linear(self.norm(x) * self.scale.mean(), self.embedded.weight)


def _net() -> Net:
    torch.set_default_dtype(torch.float64)
    return Net()


def _tokens(count: int = 6) -> Tensor:
    return torch.randint(0, 11, (count, 6, 5))


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _parted(session: Session) -> int:
    """Return the number of parameters that are not whole on this rank; 1 without lagom."""
    weights = session.backwards.parameter_store
    return sum(not u.is_whole for u in weights.units.values()) if isinstance(weights, ParameterShards) else 1


@pytest.mark.soak  # tests/test_examples.py counts what ranks hold at each level
def test_each_rank_has_its_part_of_the_parameters_only() -> None:
    def train(session: Session) -> Any:
        model = _net()
        optimizer = Adam(model.parameters(), 0.01)
        tokens = _tokens(1)[0]
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            whole = sum(storage_of(p).nbytes() for p in model.parameters())
            optimizer.step()
        weights = session.backwards.parameter_store
        assert isinstance(weights, ParameterShards)
        parts = sum(u.shard.nbytes for u in weights.units.values() if u.shard is not None)
        gc.collect()
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        return whole, parts, sum(p.nbytes for p in model.parameters())

    for whole, parts, wanted in run_ranks(2, train, zero_lvl=LEVEL):
        assert whole == 0
        assert wanted / 2 <= parts < 1.1 * wanted / 2 + 64 * 40


@pytest.mark.parametrize(
    "name",
    [
        # tests/test_documents.py and tests/test_examples.py train by Adam and AdamW, and others below by SGD
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("sgd", "adam")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("adamw", "changes gradients", "elementwise")),
        "coupled",
    ],
)
def test_weights_states_and_metrics_are_those_of_one_process(name: str) -> None:
    same(trained(OPTIMIZERS[name]), (LEVEL, 3 if name == "adamw" else 2))


@pytest.mark.soak
def test_parameters_are_shared_out_as_they_are_made() -> None:
    """A process takes at most its parts and a block or two, with layers of 16 MB."""

    def train(session: Session) -> Any:
        torch.set_default_dtype(torch.float32)
        before = _resident()
        layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))
        assert session.backwards.parameter_store.keeps_shards
        return _resident() - before, sum(p.nbytes for p in layers.parameters())

    for taken, whole in run_ranks(2, train, zero_lvl=LEVEL):
        assert taken < whole / 2 + 2 * 2048**2 * 4


def _resident() -> int:
    """Bytes that this process takes of memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_one_rank_has_the_very_bits() -> None:
    train = trained(OPTIMIZERS["adam"])
    wanted, found = alone(train), run_ranks(1, train, zero_lvl=LEVEL)[0]
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))


@pytest.mark.soak  # tests/gradients/test_changed_parameters.py has whole batches, and the tests above the default
@pytest.mark.parametrize(("batches", "evaluation"), [("whole", "gathered"), ("whole", "sharded"), ("split", "sharded")])
def test_every_setting_of_batches_and_evaluation(batches: Any, evaluation: Any) -> None:
    def train(session: Session) -> Any:
        found = trained(OPTIMIZERS["sgd"])(session)
        return found if evaluation == "gathered" else found[:2]

    same(train, (LEVEL, 2), batches=batches, evaluation=evaluation)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.1)


def _programs(session: Session) -> Any:
    """Training of all kinds."""
    model = _net()
    model.apply(_initialise)
    model.embedded.weight.data[3] *= 2
    with torch.no_grad():
        model.place.add_(0.01)
        model.convolved.weight[:2].zero_()
    optimizer = AdamW(model.parameters(), 0.01)
    seen: list[Any] = []
    for number, tokens in enumerate(_tokens(5)):
        for reentrant in {1: (None, False), 2: (True, False, None)}.get(number, (None,)):
            loss = F.cross_entropy(model(tokens, reentrant).flatten(0, 1), tokens.flatten())
            (loss + 0.1 * model.place.norm()).backward()  # used outside of a forward, too
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            seen.append(model(tokens).square().mean().item())
        model.train()
    first, second = model(tokens), model(tokens.flip(0))
    (first * second).mean().backward()
    seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    seen.append(torch.autograd.grad(model(tokens).mean(), model.embedded.weight)[0])
    model.requires_grad_(False)
    model.embedded.weight.requires_grad_(True)
    model(tokens).mean().backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.1)
    seen.append(_weights(model))
    assert _parted(session)
    return seen


@pytest.mark.soak
def test_training_of_all_kinds() -> None:
    same(_programs, (LEVEL, 3))


def test_a_state_that_does_not_fit_the_device_is_on_the_cpu_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    free = 1 << 40

    def free_bytes(device: torch.device) -> int:
        asked.append(device)
        return free

    monkeypatch.setattr(state_dict, "free_bytes", free_bytes)

    def train(session: Session) -> Any:
        nonlocal free
        model, tokens = _net(), _tokens(1)[0]
        model(tokens).square().mean().backward()
        shared = session.backwards.parameter_store
        assert isinstance(shared, ParameterShards)
        own = model.state_dict()
        assert shared.find_storage(own["place"]) is shared.find_storage(model.place)
        wanted = copy.deepcopy(own)
        free, copied = 1000, wanted
        if session.rank == 0:  # alone, as for a checkpoint
            copied = model.state_dict()
            assert len(asked) == 2  # once for a whole model, and not for each module in it
            assert list(copied) == list(own)
            assert all(shared.find_storage(one) is None and not one.requires_grad for one in copied.values())
            assert sum(unit.is_whole for unit in shared.units.values()) < 3
            assert model.state_dict(keep_vars=True)["place"] is model.place
        return [torch.equal(copied[key], value) for key, value in wanted.items()], model(tokens)

    judge = alone(lambda _: _net()(_tokens(1)[0]))
    for same_values, found in run_ranks(2, train, zero_lvl=LEVEL):
        assert all(same_values)
        assert torch.equal(found, judge)


def _looks(session: Session) -> Any:
    """Use a model as programs do besides training it; return the numbers seen."""
    model, tokens = _net(), _tokens(1)[0]
    seen: list[Any] = [repr(model.place), model.place.tolist(), float(model.place.detach().numpy().sum())]
    other = copy.deepcopy(model)
    other.place.data.zero_()
    seen.append([other(tokens), model(tokens)])
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    seen.append(torch.load(stream, weights_only=False)(tokens))
    seen.append(pickle.loads(pickle.dumps(model))(tokens))
    state = model.state_dict()
    kept, stream = copy.deepcopy(state), io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    seen += [list(state), kept, torch.load(stream)]
    with torch.no_grad():
        model.place.mul_(2)
    seen += [state["place"].clone(), kept["place"]]  # the one is the parameter's, the other a copy
    fresh = Net()
    fresh.load_state_dict(kept)
    seen.append(fresh(tokens))
    fresh.load_state_dict(state, assign=True)
    seen.append(fresh(tokens))
    seen.append(fresh.float()(tokens))
    fresh.double()
    line = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(line * 1.01, fresh.parameters())
    optimizer = SGD(fresh.parameters(), 0.1)
    fresh(tokens).mean().backward()
    optimizer.step()
    seen.append(fresh(tokens))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(fresh)
    seen.append(averaged(tokens))
    assert _parted(session)
    return seen


def test_what_is_done_with_a_model_besides_training() -> None:
    same(_looks, (LEVEL, 2))


def test_what_is_used_again_and_again_is_made_whole_a_few_times() -> None:
    def train(session: Session) -> int:
        assert session.backwards.parameter_store.keeps_shards
        torch.set_default_dtype(torch.float64)
        cell = nn.RNNCell(16, 16)
        assert session.group is not None
        calls, ask = [], session.group.ask

        def counted(what: bytes) -> bool:
            calls.append(what)
            return ask(what)

        session.group.ask = counted  # type: ignore[method-assign]

        class Unrolled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                state = x
                for _ in range(30):
                    state = cell(x, state)
                return state

        Unrolled()(torch.randn(4, 16)).sum().backward()
        return len(calls)

    assert all(count <= 2 * 4 * residency.TIMES for count in run_ranks(2, train, zero_lvl=LEVEL))


@pytest.mark.soak
def test_parameters_that_share_memory() -> None:
    """With a parameter of the same memory, and of a part of it, and with views that are kept."""

    def train(_: Session) -> Any:
        model = _net()
        model.twin = nn.Parameter(model.norm.weight.data)
        model.first = nn.Parameter(model.place.data[:2])
        view, late = model.place.detach()[1:], model.norm.bias.view(-1)
        optimizer = SGD(model.parameters(), 0.1)
        for tokens in _tokens(2):
            optimizer.zero_grad()
            (model(tokens).mean() + model.twin.square().mean() + model.first.norm()).backward()
            optimizer.step()
        with torch.no_grad():
            view.mul_(1.1)
        return _weights(model), view.clone(), late.detach().clone()

    same(train, (LEVEL, 2))


def test_what_a_rank_holds_is_counted_without_the_others() -> None:
    """Only rank 0 counts, as a rank that runs out of memory does without the others' knowing."""

    def train(session: Session) -> Any:
        before = held_memory(session)  # of tests before this one
        model = _net()
        model(_tokens(1)[0]).mean().backward()
        counted = held_memory(session) if session.rank == 0 else before
        found = counted.parameters - before.parameters, counted.gradients - before.gradients
        return *found, sum(p.nbytes for p in model.parameters())

    parameters, gradients, whole = run_ranks(2, train, zero_lvl=LEVEL)[0]
    assert whole / 2 <= parameters < 0.6 * whole
    assert gradients < 0.6 * whole


def test_a_program_that_joins_has_its_model_whole() -> None:
    def train(_: Session) -> Any:
        model = _net()
        dist.init_process_group("gloo")
        whole = [storage_of(p).nbytes() >= p.nbytes for p in model.parameters()]
        return all(whole), _weights(model)

    def plain(_: Session) -> Any:
        return True, _weights(_net())

    for found in run_ranks(2, train, zero_lvl=LEVEL):
        close(found, alone(plain))


@pytest.mark.soak
def test_an_array_of_a_parameter_follows_and_is_followed() -> None:
    def train(_: Session) -> Any:
        model = _net()
        optimizer = SGD(model.parameters(), 0.1)
        array, tokens = model.place.detach().numpy(), _tokens(1)[0]
        for _step in range(2):
            array[0] += 1.0
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        return array.copy().tolist(), _weights(model)

    same(train, (LEVEL, 2))


def test_rank_0_may_look_alone() -> None:
    """The other ranks give rank 0 the shards that it needs in their next exchange."""

    def train(session: Session) -> Any:
        model, tokens = _net(), _tokens(1)[0]
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        seen: list[Any] = []
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
            if session.rank == 0:
                state = model.state_dict()
                stream = io.BytesIO()
                torch.save(state, stream)
                seen.append(float(sum(value.sum() for value in state.values())))
                with torch.no_grad():
                    seen.append(model(tokens).sum().item())
        last = model.state_dict() if session.rank == 0 else None
        return seen, last, _weights(model)

    wanted = alone(train)
    rows = run_ranks(2, train, zero_lvl=LEVEL)
    close(rows[0], wanted)
    for row in rows[1:]:
        close(row[2], wanted[2])


@pytest.mark.soak
def test_a_state_goes_on_at_another_level_and_world_size() -> None:
    def train(start: Any) -> Callable[[Session], Any]:
        def run(_: Session) -> Any:
            model, tokens = _net(), _tokens(1)[0]
            optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
            if start is not None:
                model.load_state_dict(start[0])
                optimizer.load_state_dict(start[1])
            for _step in range(2):
                optimizer.zero_grad()
                model(tokens).square().mean().backward()
                optimizer.step()
            return copy.deepcopy(model.state_dict()), optimizer.state_dict()

        return run

    wanted, found = alone(train(None)), run_ranks(3, train(None), zero_lvl=LEVEL)
    for world_size, level in ((2, LEVEL), (1, 1)):
        wanted, found = alone(train(wanted)), run_ranks(world_size, train(found[0]), zero_lvl=level)
        for state in found:
            close(state, wanted)


@pytest.mark.soak  # test_rank_0_may_look_alone returns a state, which is pickled after the run
def test_what_a_program_returns_is_whole() -> None:
    def train(session: Session) -> Any:
        model = _net()
        optimizer = SGD(model.parameters(), 0.1)
        model(_tokens(1)[0]).mean().backward()
        optimizer.step()
        _kept.append(model if session.rank == 0 else None)  # pickled after the run, on one rank alone
        return _Later()

    for row in run_ranks(2, train, zero_lvl=LEVEL)[:1]:
        close(row, alone(train))


_kept: list[nn.Module | None] = []


class _Later:
    def __reduce__(self) -> Any:
        model = _kept[-1]
        return list, ([] if model is None else _weights(model),)


def _raises(change: Callable[[Session, Net], None]) -> None:
    """Assert that every rank gets an error after ``change``, when it trains on."""

    def train(session: Session) -> str:
        model, tokens = _net(), _tokens(1)[0]
        optimizer = SGD(model.parameters(), 0.1)
        model(tokens).mean().backward()
        optimizer.step()
        change(session, model)

        def go_on() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(tokens).mean().backward()
                optimizer.step()

        with pytest.raises(DivergenceError) as caught:
            go_on()
        raise _Seen(str(caught.value))

    with pytest.raises(RankFailedError, match=r"_Seen: .*(other values|no longer)"):
        run_ranks(2, train, zero_lvl=LEVEL)


class _Seen(Exception):
    """A rank has had the error."""


@pytest.mark.soak  # tests/extensions/zero/test_memory_access.py has other values on one rank
def test_a_change_that_one_rank_makes_is_an_error_on_all() -> None:
    def change(session: Session, model: Net) -> None:
        if session.rank == 0:
            model.place.data.mul_(2)

    _raises(change)


@pytest.mark.soak  # tests/extensions/zero/test_memory_access.py has other values on one rank
def test_a_change_of_other_values_on_other_ranks_is_an_error_on_all() -> None:
    def change(session: Session, model: Net) -> None:
        model.place.data.fill_(session.rank)

    _raises(change)


@pytest.mark.soak  # tests/extensions/zero/test_memory_access.py has values that differ once made
def test_initial_values_that_differ_are_an_error() -> None:
    def train(session: Session) -> None:
        model = _net()
        nn.init.constant_(model.place, session.rank)
        model(_tokens(1)[0]).mean().backward()

    with pytest.raises(RankFailedError, match=r"DivergenceError.*(other values|different values)"):
        run_ranks(2, train, zero_lvl=LEVEL)


@pytest.mark.soak
def test_optimizers_of_whole_parameters_are_refused() -> None:
    def train(_: Session) -> None:
        model = _net()
        optimizer = Adafactor(model.parameters(), 0.01)
        model(_tokens(1)[0]).mean().backward()
        optimizer.step()

    with pytest.raises(RankFailedError, match=r"Adafactor steps by whole parameters .* use zero_lvl=2"):
        run_ranks(2, train, zero_lvl=LEVEL)


def test_use_in_a_thread_is_an_error() -> None:
    def train(_: Session) -> list[str]:
        model, tokens, said = _net(), _tokens(1)[0], []
        model(tokens).mean().backward()

        def use() -> None:
            for look in (lambda: model(tokens), lambda: model.place.tolist(), lambda: 2 * model.place):
                with pytest.raises(LagomError, match="in another thread"):
                    look()
                said.append("raised")

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return said

    assert run_ranks(2, train, zero_lvl=LEVEL) == [["raised"] * 3] * 2


def test_use_in_a_forked_process_is_an_error() -> None:
    def train(_: Session) -> int:
        model = _net()
        model(_tokens(1)[0]).mean().backward()
        with pytest.raises(LagomError, match="share_memory"):
            model.share_memory()
        child = os.fork()
        if child == 0:
            try:
                model.place.sum()
            except LagomError:
                os._exit(3)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_ranks(2, train, zero_lvl=LEVEL) == [3, 3]
