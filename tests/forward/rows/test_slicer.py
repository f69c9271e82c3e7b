"""``batches="whole"``: every loss, metric and random number is that of one process, on every rank."""

from __future__ import annotations

import collections
import copy
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules import module as everywhere
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.config.torch_distributed import Batches, Collectives
from lagom.errors import DivergenceError
from lagom.forward.rows.module_tree import ModuleTree
from lagom.forward.rows.probe import probe
from lagom.forward.rows.slicer import watch_packing
from lagom.forward.rows.split_candidate import SplitFinding
from lagom.forward.rows.whole_batch import ForwardWork
from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, lagom_log, run_ranks

Program = Callable[[Session], Any]


def data(num: int = 13, width: int = 5) -> TensorDataset:
    """Make samples with a target each; the last batch of 8 is an uneven tail of 5."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num, width, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def trained(model: nn.Module, loss_of: Callable[[Any, Tensor, Tensor], Tensor], epochs: int = 2) -> list[Any]:
    """Train; return the losses of all steps, and the final weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        for x, y in DataLoader(data(), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [losses, *[tensor.detach().clone() for tensor in model.state_dict().values()]]


def network(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), *extra, nn.Tanh(), nn.Linear(16, 1)).double()


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch does not support torch.jit.script there")
def test_torchscript_runs_whole() -> None:
    def program(_: Session) -> Any:
        model = torch.jit.script(network())
        weights = trained(model, mean_loss)
        model.eval()
        with torch.no_grad():
            return [*weights, [((model(x) - y) ** 2).sum().item() for x, y in DataLoader(data(), 8)]]

    wanted = alone(program)
    for found in run_ranks(2, program, batches="whole", always_slices=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# tests/session/models has a compiled model on whole batches.
@pytest.mark.soak
@pytest.mark.parametrize("batches", ["split", "whole"])
def test_a_compiled_model_trains_and_is_evaluated(batches: Batches) -> None:
    def program(_: Session) -> Any:
        model: Any = torch.compile(network(), backend="eager")
        weights = trained(model, mean_loss)
        model.eval()
        with torch.no_grad():
            return [*weights, [((model(x) - y) ** 2).sum().item() for x, y in DataLoader(data(), 8)]]

    wanted = alone(program)
    for found in run_ranks(2, program, batches=batches, always_slices=True):
        own = slice(1, None) if batches == "split" else slice(None)  # the losses are those of the share
        for one, other in zip(found[own], wanted[own], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def compiles(x: Tensor) -> Any:
    """Draw in code whose operations torch's dispatcher does not show to this thread."""

    def in_another_thread(graph: Any, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.append(graph(*inputs)))
            thread.start()
            thread.join()
            return found[0]

        return run

    draw: Any = torch.rand_like
    fast: Any = torch.compile(draw, backend=in_another_thread)
    return fast(x)


def compiles_what_draws_in_another_way(x: Tensor) -> Any:
    def draw(x: Any) -> Any:
        return torch.rand_like(x.t()).t()

    return torch.compile(draw, backend="eager")(x)


def exports(x: Tensor) -> Tensor:
    torch.export.export(nn.Softplus(), (torch.zeros(3),), strict=False)
    return torch.rand_like(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("make", [compiles, compiles_what_draws_in_another_way, exports])
def test_code_that_is_compiled_later_in_a_forward_draws_for_the_whole_batch(make: Callable[[Tensor], Any]) -> None:
    def program(_: Session) -> Any:
        rows: list[int] = []
        note = rows.append

        class Hurrying(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.rest = network(nn.Dropout(0.3)), nn.Linear(5, 1).double()

            def forward(self, x: Tensor) -> Any:
                note(len(x))
                made = make(x) if "TESTS_COMPILE" in os.environ else torch.rand_like(x)  # lagom compares no variables
                return self.rest(F.dropout(self.first(x) + made, 0.2))

        model = Hurrying()
        before = trained(model, mean_loss), list(rows)
        os.environ["TESTS_COMPILE"] = "1"
        try:
            return [before[0], trained(model, mean_loss), torch.rand(3)], before[1]
        finally:
            del os.environ["TESTS_COMPILE"]

    wanted, _ = alone(program)
    for found, rows in run_ranks(2, program, batches="whole", always_slices=True):
        assert rows[-1] < 5, "the forward is sliced before it compiles"
        assert_equal(found, wanted)


def sum_loss(session: Session) -> Any:
    return trained(network(), lambda model, x, y: F.mse_loss(model(x), y, reduction="sum"))


def contrastive(session: Session) -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        z = F.normalize(model[0](x), dim=1)
        return F.cross_entropy(z @ z.T / 0.3, torch.arange(len(x)))

    return trained(network(), loss)


def weight_decay_in_the_loss(session: Session) -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        return mean_loss(model, x, y) + 0.1 * sum(p.square().sum() for p in model.parameters())

    return trained(network(), loss)


def dropout_and_batch_norm(session: Session) -> Any:
    return trained(network(nn.BatchNorm1d(16), nn.Dropout(0.4)), mean_loss)


def chained_modules(session: Session) -> Any:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = network(nn.Dropout(0.2)), nn.Linear(1, 5).double()

        def loss(self, x: Tensor, y: Tensor) -> Any:
            z = self.encoder(x)
            return F.mse_loss(self.decoder(z), x) + (z - y).abs().sum()

    return trained(Both(), lambda model, x, y: model.loss(x, y))


def penalised_gradient(session: Session) -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return mean_loss(model, x, y) + (slope.norm(dim=1) - 1).square().sum()

    return trained(network(), loss)


def two_heads(session: Session) -> Any:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = network(), nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor, flag: bool) -> dict[str, Any]:
            out = self.body(x)
            return {
                "out": out,
                "kept": out.detach(),
                "scale": self.scale.exp(),
                "label": (out > 0).long(),
                "flag": flag,
            }

    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        found = model(x, flag=True)
        assert not found["kept"].requires_grad
        assert found["label"].dtype == torch.int64
        return (found["out"] * found["scale"] - y).square().sum() + found["kept"].std() * found["scale"]

    return trained(Heads(), loss)


def repeated_in_the_backward(session: Session) -> Any:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.first, self.rest, self.reentrant = nn.Linear(5, 5).double(), network(nn.Dropout(0.3)), reentrant

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.rest, self.first(x), use_reentrant=self.reentrant)

    return [trained(Checkpointed(reentrant), mean_loss) for reentrant in (False, True)]


def noise_of_its_own(session: Session) -> Any:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor) -> Any:
            shared = torch.rand(5, dtype=x.dtype)
            return self.body(x + 0.1 * torch.randn_like(x) + shared * torch.empty(len(x), 1).uniform_())

    return trained(Noisy(), mean_loss)


def draws_with_gradients(session: Session) -> Any:
    """The program's draws are of tensors that need gradients, as dropout's are on GPUs."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(5, 5).double(), network()

        def forward(self, x: Tensor) -> Any:
            kept = torch.native_dropout(self.first(x), 0.3, True)[0]
            return self.rest(kept + self.first(x).uniform_())

    return trained(Drawing(), mean_loss)


def draws_without_gradients(session: Session) -> Any:
    model = network(nn.Dropout(0.4), nn.LayerNorm(16))
    found = trained(model, mean_loss)
    with torch.no_grad():
        found += [[model(x).sum().item() for x, _ in DataLoader(data(), batch_size=8)]]
    with torch.inference_mode():
        return [*found, [model(x).sum().item() for x, _ in DataLoader(data(), batch_size=8)]]


def text_in_the_forward(session: Session) -> Any:
    """torch formats a tensor without dispatch modes."""

    class Formatting(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = network(nn.Dropout(0.3))
            self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Any:
            return self.body(x) * len(str(self.scale))

    return trained(Formatting(), mean_loss, epochs=6)  # enough calls for a forward that goes another way to run whole


def recurrent(session: Session) -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1, 6, num_layers=2, dropout=0.3, batch_first=True).double()
            self.out = nn.Linear(6, 1).double()

        def forward(self, x: Tensor) -> Any:
            return self.out(self.lstm(x.unsqueeze(-1))[0][:, -1])

    return trained(Recurrent(), mean_loss)


def attention(session: Session) -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
            self.into, self.body, self.out = nn.Linear(1, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 1)
            self.double()

        def forward(self, x: Tensor) -> Any:
            return self.out(self.body(self.into(x.unsqueeze(-1))).mean(1))

    return trained(Attention(), mean_loss)


class Twice(nn.Module):
    """Returns one tensor twice, as models do that have their last hidden state among all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return {"last": hidden, "all": (hidden,)}


def one_tensor_twice(session: Session) -> Any:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        outputs["last"].mul_(2)
        return F.mse_loss(outputs["all"][0], y)

    return trained(Twice(), loss_of)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.body(x), y, reduction="sum")


def loss_inside(session: Session) -> Any:
    return trained(WithLoss(), lambda model, x, y: model(x, y))


SLICED: list[Program] = [
    *(sum_loss, contrastive, weight_decay_in_the_loss, dropout_and_batch_norm, chained_modules, penalised_gradient),
    *(two_heads, repeated_in_the_backward, noise_of_its_own, recurrent, attention, one_tensor_twice),
    *(draws_with_gradients, draws_without_gradients, text_in_the_forward, loss_inside),
]


class Coupled(nn.Module):
    """Rows that depend on each other, behind a gate that starts closed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = network(), nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        out = self.body(x)
        return out + self.gate * out.mean(0)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = network()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.body[0](x)
        self.seen.append(hidden)
        return self.body[2](hidden.tanh())


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return y / 2 if y.max() > 0.1 else y


class Counting(nn.Module):
    """A buffer that depends on the batch, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = network(), 0
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen += x.abs().sum()
        return self.body(x) * self.seen.log()


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, 1).double()

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x.unsqueeze(-1))[0]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = network()
        self.features: list[Tensor] = []
        self.body[0].register_forward_hook(lambda _module, _args, out: self.features.append(out.sum()))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class Caching(nn.Module):
    """Changes the dict or the object in its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor, cache: Any) -> Any:
        cache["rows"] += float(len(x))
        return self.body(x) * cache["rows"]


def caching(session: Session) -> Any:
    found: list[Any] = []
    for kind in (dict, collections.UserDict):
        cache: Any = kind(rows=0.0)

        def loss(model: Any, x: Tensor, y: Tensor, cache: Any = cache) -> Any:
            return F.mse_loss(model(x, cache), y) / 1e4

        found += [*trained(Caching(), loss), cache["rows"]]
    return found


def coupled(session: Session) -> Any:
    return trained(Coupled(), mean_loss)


def remembering(session: Session) -> Any:
    model = Remembering()
    results = trained(model, lambda model, x, y: mean_loss(model, x, y) + model.seen[-1].square().sum())
    return [*results, [len(seen) for seen in model.seen]]


def deciding(session: Session) -> Any:
    return trained(Deciding(), mean_loss)


def counting(session: Session) -> Any:
    model = Counting()
    return [*trained(model, mean_loss), model.calls]


def time_first(session: Session) -> Any:
    return trained(TimeFirst(), lambda model, x, y: (model(x)[:, -1] - y[:, 0]).square().sum())


def hooked(session: Session) -> Any:
    model = Hooked()
    results = trained(model, lambda model, x, y: mean_loss(model, x, y) + model.features[-1].square())
    return [*results, len(model.features)]


WHOLE: list[Program] = [caching, coupled, remembering, deciding, counting, time_first, hooked]


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


@cache
def in_one_process() -> dict[str, Any]:
    found: dict[str, Any] = alone(lambda session: {name: run(session)[0] for name, run in RUNS.items()})
    return found


@cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    """Return for each rank and program its result, and what was said of modules that are not sliced."""
    return run_ranks(world_size, lambda session: {name: run(session) for name, run in RUNS.items()}, batches="whole")


def run_alike(session: Session, program: Program) -> tuple[Any, list[str]]:
    """Run ``program`` as the first in its process: with the same random numbers, and nothing said before."""
    seed_everything(0)
    session.said.clear()
    return program(session), whole_on_every_rank(session)


RUNS = {program.__name__: partial(run_alike, program=program) for program in (*SLICED, *WHOLE)}


# test_each_rank_computes_its_block has a middle rank by default, and two ranks have uneven tails.
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_those_of_one_machine(name: str, world_size: int) -> None:
    for found in on_ranks(world_size):
        assert_equal(found[name][0], in_one_process()[name])


@pytest.mark.parametrize("program", SLICED, ids=lambda program: program.__name__)
def test_forwards_by_rows_are_sliced(program: Program) -> None:
    assert [found[program.__name__][1] for found in on_ranks(2)] == [[], []]


REASONS = {
    "caching": "changes the lists",
    "coupled": "one by one",
    "remembering": "keeps a tensor",
    "deciding": "decisions by the numbers of its input",
    "counting": "changes numbers among its attributes",
    "time_first": "one by one",
    "hooked": "has hooks",
}


@pytest.mark.parametrize("program", WHOLE, ids=lambda program: program.__name__)
def test_others_run_whole_and_the_log_says_why(program: Program) -> None:
    for found in on_ranks(2):
        assert any(REASONS[program.__name__] in text for text in found[program.__name__][1])


def whole_on_every_rank(session: Session) -> list[str]:
    return sorted(text for text in session.said if "runs whole on every rank" in text)


def rows_seen(model: nn.Linear, rows: list[int]) -> nn.Module:
    """Return ``model`` with a forward that appends its number of rows to ``rows``.

    It uses no hook, and no list that lagom can see: either would keep the model from being sliced.
    """
    note = rows.append

    class Noting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            note(len(input))
            return super().forward(input)

    noting = Noting(model.in_features, model.out_features).double()
    noting.load_state_dict(model.state_dict())
    return noting


def test_each_rank_computes_its_block() -> None:
    def program(session: Session) -> Any:
        rows: list[int] = []
        model = rows_seen(nn.Linear(5, 1).double(), rows)
        for x, y in DataLoader(data(31), batch_size=10):
            F.mse_loss(model(x), y).backward()
        return rows

    first, second, third = run_ranks(3, program, batches="whole")
    # Whole, and whether it can be called again; in the probe: whole, with a row of NaN, and in blocks; then blocks;
    # every rank computes a single sample.
    assert first == [10, 3, 10, 10, 3, 3, 4, 3, 3, 1]
    assert second == [10, 3, 10, 10, 3, 3, 4, 3, 3, 1]
    assert third == [10, 3, 10, 10, 3, 3, 4, 4, 4, 1]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_forward_that_cannot_be_called_twice_runs_whole(world_size: int) -> None:
    """Stand in for a library that records what a forward does, and refuses to record it twice between two steps."""
    busy = threading.Lock()

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Any:
            if not busy.acquire(blocking=False):
                raise RuntimeError("called twice")
            return self.net(x)

    def once(session: Session) -> Any:
        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
            found = mean_loss(model, x, y)
            busy.release()
            return found

        return trained(Once(), loss), whole_on_every_rank(session)

    expected, _ = alone(once)
    for found, said in run_ranks(world_size, once, batches="whole"):
        assert_equal(found, expected)
        assert any("called twice" in line for line in said)


@pytest.mark.soak  # test_through_shared_memory_less_is_enough_to_pay
def test_what_does_not_pay_is_not_sliced() -> None:
    def program(session: Session) -> Any:
        rows: list[int] = []
        small = rows_seen(nn.Linear(5, 1).double(), rows)
        for x, y in DataLoader(data(16), batch_size=8):
            F.mse_loss(small(x), y).backward()
        wide: list[int] = []
        large = rows_seen(nn.Linear(512, 1024).double(), wide)
        large.requires_grad_(False)
        for _ in range(2):
            large(torch.randn(1024, 512, dtype=torch.float64))
        return rows, wide

    for rows, wide in run_ranks(2, program, batches="whole", always_slices=False):
        assert rows == [8, 8]
        assert wide == [1024, 512, 1024, 1024, 512, 512, 512]


@pytest.mark.soak
def test_what_shares_out_small_models_is_said_once() -> None:
    def program(session: Session) -> Any:
        small, large = network(nn.BatchNorm1d(16)), nn.Linear(2048, 1024).double()
        loader = DataLoader(data(16), batch_size=8)

        def said() -> list[str]:
            found = [text for text in session.said if "batches='split'" in text]
            session.said.clear()
            return found

        for _ in range(3):  # without a loader there are no batches to split
            small(torch.randn(8, 5, dtype=torch.float64)).sum().backward()
        with torch.no_grad():
            for x, _ in loader:
                small(x)
        small.eval()
        for x, _ in loader:
            small(x)
        assert said() == []
        small.train()
        for x, y in loader:
            large(torch.ones(2048, 2048, dtype=torch.float64).requires_grad_())
            mean_loss(small, x, y).backward()
        beside_work = said()
        del large
        return beside_work

    assert run_ranks(2, program, batches="whole", always_slices=False) == [[], []]

    def small_only(session: Session) -> list[str]:
        trained(network(), mean_loss)
        trained(nn.Sequential(network()), mean_loss)
        return sorted(session.said)

    first, second = run_ranks(2, small_only, batches="whole", always_slices=False)
    assert len(first) == 1
    assert first[0].startswith("Sequential is small: every rank computes it whole")
    assert "batches='split'" in first[0]
    assert "verify=True tells" in first[0]
    assert second == []
    assert run_ranks(2, small_only, batches="split") == [[], []]


@pytest.mark.parametrize(
    ("collectives", "blocks"), [("auto", [512, 256, 512, 512, 256, 256, 256, 256]), ("gloo", [512] * 3)]
)
def test_through_shared_memory_less_is_enough_to_pay(collectives: Collectives, blocks: list[int]) -> None:
    def program(_: Session) -> list[int]:
        rows: list[int] = []
        module = rows_seen(nn.Linear(2048, 32).double(), rows).requires_grad_(False)
        for (x,) in DataLoader(TensorDataset(torch.randn(1536, 2048, dtype=torch.float64)), batch_size=512):
            module(x)
        return rows

    assert run_ranks(2, program, batches="whole", always_slices=False, collectives=collectives) == [blocks] * 2


def test_metrics_of_an_evaluation_are_those_of_one_machine() -> None:
    def program(session: Session) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
        rows: list[int] = []
        model.append(rows_seen(nn.Linear(1, 1).double(), rows))
        found: list[Any] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(3):
            model.train()
            for x, y in DataLoader(data(32), batch_size=8):
                optimizer.zero_grad()
                mean_loss(model, x, y).backward()
                optimizer.step()
            model.eval()
            rows.clear()
            with torch.inference_mode(epoch == 0), torch.no_grad():
                outputs = [(model(x), y) for x, y in DataLoader(data(22), batch_size=8, shuffle=True)]
            together = torch.cat([out for out, _ in outputs])
            found += [sum(F.mse_loss(out, y, reduction="sum").item() for out, y in outputs), together.std().item()]
            found += [(together > together.median()).long(), len(outputs), together.clone()]
        return found, rows

    (expected, plain_rows) = alone(program)
    assert plain_rows == [8, 8, 6]
    for world_size in (2, 3):
        results = run_ranks(world_size, program, evaluation="gathered")
        for found, _ in results:
            assert_equal(found, expected)
        assert sum(sum(rows[-3:]) for _, rows in results) == 22


def test_a_model_called_with_a_share_while_evaluating_runs_whole() -> None:
    def program(session: Session) -> Any:
        model = nn.Linear(5, 1).double()
        train = DataLoader(data(16), batch_size=8)
        for x, y in train:
            mean_loss(model, x, y).backward()
        model.eval()
        with torch.no_grad():
            for whole, _ in DataLoader(data(8), batch_size=8):
                model(whole)
                found = torch.equal(model(x), F.linear(x, model.weight, model.bias)), len(x)
        return found

    assert run_ranks(2, program, evaluation="gathered") == [(True, 4), (True, 4)]


def test_a_forward_that_runs_again_whole_draws_and_counts_once() -> None:
    def program(_: Session) -> None:
        model: Any = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
        share, _y = next(iter(DataLoader(data(8), batch_size=8)))
        with torch.no_grad():
            for whole, _y in DataLoader(data(24), batch_size=8):
                model(whole)
            for _whole in DataLoader(data(8), batch_size=8):  # an evaluation again
                plain, state = copy.deepcopy(model), torch.get_rng_state()
                found, after = model(share), torch.get_rng_state()
                torch.set_rng_state(state)
                linear, norm, _ = plain
                hidden = F.linear(share, linear.weight, linear.bias)
                means, variances = norm.running_mean, norm.running_var
                hidden = F.batch_norm(hidden, means, variances, norm.weight, norm.bias, training=True)
                torch.testing.assert_close(found, F.dropout(hidden, 0.5), rtol=0, atol=1e-12)
                assert torch.equal(after, torch.get_rng_state())
                torch.testing.assert_close(model[1].running_mean, means, rtol=0, atol=1e-12)
                torch.testing.assert_close(model[1].running_var, variances, rtol=0, atol=1e-12)
                assert model[1].num_batches_tracked == norm.num_batches_tracked + 1

    run_ranks(2, program, evaluation="gathered")


@pytest.mark.parametrize(
    "register",
    [
        everywhere.register_module_forward_hook,
        everywhere.register_module_forward_pre_hook,
        everywhere.register_module_full_backward_pre_hook,
    ],
    ids=lambda register: register.__name__,
)
def test_a_hook_of_all_modules_that_comes_later_sees_whole_batches(register: Callable[..., Any]) -> None:
    def program(_: Session) -> list[int]:
        model, seen = network(), list[int]()

        def hook(*args: Any) -> None:
            last = args[-1]
            seen.append(len(last[0] if isinstance(last, tuple) else last))

        for step in range(9):
            handle = register(hook) if step in (4, 5, 7) else None
            model(torch.randn(8, 5, dtype=torch.float64, requires_grad=True)).square().sum().backward()
            if handle is not None:
                handle.remove()
        return seen

    wanted = alone(program)
    assert wanted == [8] * 12
    assert run_ranks(2, program, batches="whole") == [wanted] * 2


def test_other_inputs_on_other_ranks_are_an_error() -> None:
    def program(session: Session) -> Any:
        model = nn.Linear(5, 1).double()
        for _ in range(2):
            model(torch.randn(8, 5, dtype=torch.float64))
        with pytest.raises(DivergenceError, match="not the same on all ranks"):
            model(torch.full((8, 5), float(session.rank), dtype=torch.float64))

    run_ranks(2, program, batches="whole")


def test_an_evaluation_on_one_rank_only_is_an_error_on_all() -> None:
    def program(session: Session) -> Any:
        model = nn.Linear(5, 1).double()
        if session.rank == 0:
            model.eval()
            with torch.no_grad():
                for x, _ in DataLoader(data(8), batch_size=8):
                    model(x)
        for x, y in DataLoader(data(8), batch_size=8):
            mean_loss(model, x, y).backward()

    with pytest.raises(RankFailedError, match="different points of the program"):
        run_ranks(2, program, evaluation="gathered")


class Centred(nn.Module):
    """Mixes rows by their mean; equal rows do not show this."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x - x.mean(0))
        return found


@pytest.mark.soak  # tests/forward/micro_batches has such rows by default
def test_rows_that_are_all_alike_do_not_tell_whether_they_are_mixed() -> None:
    def program(_: Session) -> Any:
        model = Centred()
        for _warm_up in range(3):
            model(torch.zeros(8, 5, dtype=torch.float64))
        return trained(model, mean_loss)

    plain = alone(program)
    for found in run_ranks(2, program, batches="whole", always_slices=True):
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_a_module_is_as_it_was_after_it_was_looked_at() -> None:
    def program(session: Session) -> Any:
        model = network(nn.BatchNorm1d(16), nn.Dropout(0.5))
        nn.init.zeros_(model.get_parameter("0.bias"))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        numpy_state: Any = np.random.get_state()
        states = torch.get_rng_state(), random.getstate(), numpy_state[1].copy()
        with session.forwards.probing():
            x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            candidate = ModuleTree(print).candidate(model, nn.Module.__call__, (x,), {}, session.device)
            finding = SplitFinding(ForwardWork(rows=8))
            probe(candidate, finding, 2, session.forwards.statistics)
        assert finding.sliced, finding.reason
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1] == random.getstate()
        numpy_state = np.random.get_state()
        assert np.array_equal(states[2], numpy_state[1])
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name

    run_ranks(2, program, batches="whole")


@pytest.mark.parametrize("always_slices", [True, False])
def test_a_module_that_is_dropped_is_gone(always_slices: bool) -> None:
    def run(_: Session) -> bool:
        model = network()
        for _step in range(3):
            model(torch.randn(8, 5, dtype=torch.float64)).sum().backward()
        ref = weakref.ref(model)
        del model
        return ref() is None

    assert run_ranks(2, run, batches="whole", always_slices=always_slices) == [True, True]


def test_a_batch_may_be_a_column_of_something_wider() -> None:
    def run(session: Session) -> Any:
        model = nn.Linear(1, 1, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(0.5)
        column = torch.arange(12, dtype=torch.float64).view(4, 3)[:, 1:2]
        for _ in range(2):
            model(column).square().mean().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    plain = alone(run)
    assert run_ranks(2, run, batches="whole") == [pytest.approx(plain, abs=1e-12)] * 2


@pytest.mark.soak  # test_forwards_by_rows_are_sliced has both layers
def test_batchnorm_beside_dropout_stays_sliced() -> None:
    def run(_: Session) -> list[str]:
        said = lagom_log()
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        for _step in range(24):
            model(torch.randn(8, 3)).square().mean().backward()
        return [line for line in said if "runs whole" in line]

    assert run_ranks(2, run, batches="whole") == [[], []]


def test_hooks_on_saved_tensors_are_seen_where_torch_does_not_tell_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(saved_tensors_hooks):
        """Hooks of a program's own class."""

    def pack(x: Tensor) -> Tensor:
        return x

    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    session = SimpleNamespace(forwards=SimpleNamespace(shares_forwards=True), is_in_thread=False)
    functions = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    with watch_packing(cast("Session", session)):
        with save_on_cpu():
            assert session.forwards.shares_forwards
            with saved_tensors_hooks(pack, pack):
                with Own(pack, pack):
                    assert not session.forwards.shares_forwards
                assert not session.forwards.shares_forwards
            assert session.forwards.shares_forwards
        with pytest.raises(ZeroDivisionError), Own(pack, pack):
            raise ZeroDivisionError
        assert session.forwards.shares_forwards
    assert (saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__) == functions


def test_an_output_without_elements_may_be_a_view_of_what_the_backward_needs() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6).double()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.linear(x)
            return hidden.pow(2), hidden[:, :0]

    def program(_: Session | None = None) -> torch.Tensor:
        torch.manual_seed(2)
        module, x = Part(), torch.randn(8, 4, dtype=torch.float64)
        for _step in range(2):
            module.zero_grad()
            squares, nothing = module(x)
            (squares.mean() + nothing.sum()).backward()
        grad = module.linear.weight.grad
        assert isinstance(grad, Tensor)
        return grad

    for found in run_ranks(2, program, batches="whole", always_slices=True):
        assert torch.allclose(found, program())


def test_plain_values_that_differ_between_ranks_are_an_error() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return F.linear(x, self.linear.weight, self.linear.bias) * factor

    def program(session: Session) -> None:
        module = Scaled()
        for step in range(3):
            module(torch.randn(8, 4), 1.0 + session.rank * (step == 2)).sum().backward()

    with pytest.raises(RankFailedError, match="not the same on all ranks"):
        run_ranks(2, program, batches="whole", always_slices=True)
