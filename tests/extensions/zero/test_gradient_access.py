"""``zero_lvl=2``: each rank keeps its part of gradients, and a program that looks sees them whole."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adafactor, Adam, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.exchange.background import BackgroundTask
from lagom.exchange.group import Group
from lagom.extensions.zero.gradient_shards import GradientShards
from lagom.gradients import overlap
from lagom.gradients.reduction import buckets
from lagom.session.session import Session
from tests.extensions.zero.test_zero_steps import close, same
from tests.ranks import RankFailedError, alone, run_ranks

SLOT: Any = vars(torch._C.TensorBase)["grad"]


def _model() -> nn.Sequential:
    torch.set_default_dtype(torch.float64)
    return nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))


def _started(make: Callable[[Any], Optimizer] = lambda p: Adam(p, 0.01)) -> tuple[Any, Optimizer, Tensor]:
    """A model whose gradients are shared out from now on."""
    model = _model()
    optimizer = make(model.parameters())
    x = torch.randn(6, 7)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.soak  # tests/test_examples.py counts what ranks hold at each level
@pytest.mark.parametrize("make", [lambda p: Adam(p, 0.01), lambda p: Adafactor(p, 0.01)], ids=["elements", "whole"])
def test_each_rank_keeps_its_part_only(make: Any) -> None:
    def train(session: Session) -> Any:
        model, optimizer, x = _started(make)
        model(x).square().mean().backward()
        gradients = session.backwards.gradient_store
        assert isinstance(gradients, GradientShards)
        assert all(SLOT.__get__(p) is None for p in model.parameters())
        parts = [gradients.own_shard(p)[1] for p in model.parameters()]
        held = sum(part.untyped_storage().nbytes() for part in parts if part is not None)
        optimizer.step()
        assert all(SLOT.__get__(p) is None for p in model.parameters())
        optimizer.zero_grad()
        gc.collect()
        return held, sum(p.nbytes for p in model.parameters())

    rows = run_ranks(3, train, zero_lvl=2)  # uneven parts
    assert sum(held for held, _ in rows) == rows[0][1]
    if make(_model().parameters()).__class__ is Adam:
        assert all(held < 1.15 * whole / 3 for held, whole in rows)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_gradients_that_a_program_reads_and_changes_are_whole(world_size: int) -> None:
    def train(_: Session) -> Any:
        model, optimizer, x = _started(lambda p: SGD(p, 0.1, momentum=0.9))
        seen: list[Any] = []
        for number in range(6):
            model(x).square().mean().backward()
            first: Any = next(model.parameters())
            if number == 0:
                seen.append(copy.deepcopy([p.grad for p in model.parameters()]))
            if number == 1:
                assert first.grad is first.grad
                seen.append(first.grad.sum().item())
                first.grad.mul_(0.5)
            if number == 2:
                for p in model.parameters():
                    p.grad = p.grad.sign() if p.grad is not None else None
            if number == 3:
                kept: list[Any] = [p.grad for p in model.parameters()]
                model(x).square().sum().backward()  # adds to those
                for gradient in kept:
                    gradient.mul_(0.1)
            if number == 4:
                model(2 * x).square().mean().backward()  # two, with nothing read in between
                model(3 * x).mean().backward()
            optimizer.step()
            if number == 5:
                seen.append([p.grad.clone() for p in model.parameters()])
            if number % 2:
                optimizer.zero_grad(set_to_none=False)
                seen.append(sum(float(p.grad.abs().sum()) for p in model.parameters()))
            else:
                model.zero_grad()
                seen.append([p.grad is None for p in model.parameters()])
        return seen, _weights(model)

    same(train, (2, world_size))


@pytest.mark.forked  # a pickled function keeps the clip_grad_norm_ that it was made with
def test_clipping_and_scaling_of_parts() -> None:
    """Neither clipping nor scaling gathers a gradient, and the norms are those of whole gradients."""

    def train(session: Session) -> Any:
        model, optimizer, x = _started()
        alien = nn.Parameter(torch.ones(3, dtype=torch.float64))  # of no optimizer: whole
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        norms = []
        for number, order in enumerate((2.0, 1.0, 3.0, float("inf"), 2.0)):
            loss = (model(x) * (float("inf") if number == 4 else 1.0)).square().mean() + (alien**2).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_([alien, *model.parameters()], 0.1, norm_type=order))
            if number == 1:
                clip_grad_value_(model.parameters(), 1e-3)
            if session.backwards.gradient_store.keeps_shards:
                assert all(SLOT.__get__(p) is None for p in model.parameters())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            alien.grad = None
        (model(x) * float("nan")).mean().backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        return [float(n) for n in norms[:4]], float(norms[4]), scaler.get_scale(), _weights(model)

    wanted = alone(train)
    for found in run_ranks(3, train, zero_lvl=2):
        close(found[:1] + found[2:], wanted[:1] + wanted[2:])
        assert found[1] != found[1] or found[1] == wanted[1]


@pytest.mark.soak
def test_parameters_of_all_kinds() -> None:
    def train(_: Session) -> Any:
        torch.set_default_dtype(torch.float64)
        waves = nn.Parameter(torch.randn(150, dtype=torch.complex128))
        conv = nn.Conv2d(4, 20, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        frozen = nn.Linear(30, 30)
        frozen.weight.requires_grad_(False)
        coarse = nn.Parameter(torch.randn(400, dtype=torch.bfloat16))
        turned, gappy = nn.Parameter(torch.randn(30, 20).t()), nn.Parameter(torch.randn(30, 20)[:, ::2])
        rows, lazy, norm = nn.Embedding(50, 8, sparse=True), nn.LazyLinear(5), nn.BatchNorm1d(20)
        mixed = [waves, *conv.parameters(), *frozen.parameters(), coarse, turned, gappy]
        optimizers = [Adam(mixed, 0.01), *(SGD(one.parameters(), 0.1) for one in (rows, lazy, norm))]
        for x, i in 2 * list(DataLoader(TensorDataset(torch.randn(12, 20), torch.arange(12)), batch_size=6)):
            hidden = norm(x)
            outputs = [waves.abs() * 0.1, conv(torch.ones(1, 4, 5, 5)), rows(i), frozen(torch.ones(2, 30))]
            outputs += [coarse.double(), hidden @ turned, gappy * 0.1, lazy(hidden)]
            sum(one.square().mean() for one in outputs).backward()
            clip_grad_norm_([*mixed, *lazy.parameters()], 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        states = optimizers[0].state_dict()["state"].values()
        every = [*mixed, *(p for one in (rows, lazy, norm) for p in one.parameters())]
        return [p.detach().clone() for p in every], [(s["exp_avg"], s["exp_avg"].stride()) for s in states]

    same(train, (1, 2), (2, 3), batches="whole")


@pytest.mark.soak  # test_clipping_and_scaling_of_parts has a scaler that looks at parts
def test_fp16_by_flag_looks_at_parts() -> None:
    def train(session: Session) -> Any:
        model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 1))
        optimizer = Adam(model.parameters(), 0.01)
        x, whole, huge = torch.randn(6, 7), [], torch.tensor(1.0)
        for number in range(5):
            huge.fill_(1e30 if number == 3 else 1.0)  # which overflows on its way back
            (model(x).square().mean() * huge).backward()
            optimizer.step()
            whole.append(SLOT.__get__(model[0].weight) is not None)
            optimizer.zero_grad()
        if session.backwards.gradient_store.keeps_shards:
            assert whole == [True, False, False, True, False]
        return _weights(model)

    wanted = run_ranks(2, train, mixed_precision="fp16")[0]
    assert all(bool(p.isfinite().all()) for p in wanted)
    for found in run_ranks(2, train, zero_lvl=2, mixed_precision="fp16"):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def test_hooks_checkpoints_branches_and_another_optimizer() -> None:
    def train(_: Session) -> Any:
        model, optimizer, x = _started()
        extra = nn.Linear(7, 30)
        branch = SGD(extra.parameters(), 0.1)
        seen = []
        handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
        for number in range(4):
            model(x).square().mean().backward()
            hidden = checkpoint(model[0], x, use_reentrant=False)
            if number % 2:
                extra(x).square().mean().backward()
            model[1:](hidden).square().mean().backward()
            optimizer.step()
            branch.step()
            if number == 1:
                handle.remove()
            optimizer.zero_grad()
            branch.zero_grad()
        second = Adam(model.parameters(), 0.02)
        for _step in range(3):
            model(x).square().mean().backward()
            second.step()
            second.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.add_param_group({"params": list(extra.parameters())})
        for _step in range(2):
            (model(x).square().mean() + extra(x).mean()).backward()
            optimizer.step()
        (first,) = torch.autograd.grad(model(x).sum(), [model[0].weight])
        return seen, _weights(model), _weights(extra), first

    same(train, (2, 2))


class Fragile(torch.autograd.Function):
    """Its backward fails when it is told to."""

    fails = False

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        if Fragile.fails:
            raise ValueError("as it was told to")
        return gradient


@pytest.mark.soak
@pytest.mark.parametrize("way", ["parts", "whole"])
def test_large_gradients_are_cut_while_a_backward_runs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank gets its part of the sums only if ranks share memory, else whole sums."""
    monkeypatch.setattr(overlap, "MIN_BYTES", 1 << 20)
    if way == "whole":
        monkeypatch.setattr(Group, "reduces_parts", False)
    # At once, and not when it has come to pass: that depends on the machine.
    monkeypatch.setattr(BackgroundTask, "is_completed", lambda task: task.wait() or True, raising=False)

    def train(session: Session) -> Any:
        torch.set_default_dtype(torch.float64)
        wide = 400  # 1.3 MB
        model: Any = nn.Sequential(nn.Linear(3, wide), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide))
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        early: list[int] = []
        is_sharded = session.backwards.gradient_store.keeps_shards
        if is_sharded:
            name = "cut_own_part" if way == "whole" or not _shares_memory(session) else "store_part_early"
            done: Any = getattr(session.backwards.gradient_store, name)

            def note_depth(*given: Any) -> Any:
                early.append(session.backwards.depth)
                return done(*given)

            setattr(session.backwards.gradient_store, name, note_depth)
        none = []
        for number in range(7):
            x = torch.randn(6, 3)

            def loss(x: Tensor = x) -> Tensor:
                hidden = Fragile.apply(model[0](x))  # type: ignore[no-untyped-call]
                return model[1:](hidden).square().mean()  # type: ignore[no-any-return]

            if number == 3:
                Fragile.fails = True
                with pytest.raises(ValueError, match="told"):
                    loss().backward()
                Fragile.fails = False
                none = [p.grad is None for p in model.parameters()] if is_sharded else [True] * 6
                model.zero_grad()
            loss().backward()
            if number != 4:  # accumulates
                optimizer.step()
                optimizer.zero_grad()
        assert not is_sharded or early.count(1) > 4
        return none, _weights(model)

    same(train, (2, 2), (2, 3))


def _shares_memory(session: Session) -> bool:
    assert session.group is not None
    session.group.barrier()
    return session.group.shares_memory


@pytest.mark.soak
def test_parts_of_sums_have_the_bits_of_whole_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of halves, of gradients that lie otherwise in memory, unused ones, and several in a bucket."""
    monkeypatch.setattr(overlap, "MIN_BYTES", 1 << 16)
    monkeypatch.setattr(buckets, "ALONE", 1 << 17)
    monkeypatch.setattr(buckets, "TOGETHER", 1 << 16)

    def train(session: Session) -> Any:
        gradients = session.backwards.gradient_store
        assert isinstance(gradients, GradientShards)
        came: list[int] = []
        take = gradients.store_part_early
        gradients.store_part_early = lambda *given: came.append(is_whole) or take(*given)  # type: ignore[func-returns-value, method-assign]
        found_by_way = []
        for is_whole in (True, False):
            Group.reduces_parts = False if is_whole else way  # type: ignore[assignment, method-assign]
            torch.manual_seed(1)
            first: Any = nn.Conv2d(3, 64, 3)
            first.to(memory_format=torch.channels_last)
            rest = [nn.Linear(64, 300), nn.Linear(300, 300), *[nn.Linear(300, 61) for _ in range(3)]]
            half = nn.Linear(300, 301).bfloat16()
            model = nn.ModuleList([first, *rest, half])
            optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
            for number in range(6):
                x = torch.randn(2, 3, 4, 4) * (1 + session.rank)
                hidden = rest[1](rest[0](first(x).relu().mean((2, 3))).tanh())
                found = sum(one(hidden).square().mean() for one in rest[2 : 5 - (number == 4)])
                found = found + half(hidden.bfloat16()).float().square().mean()
                assert isinstance(found, Tensor)
                found.backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            found_by_way.append(_weights(model))
        assert True not in came
        assert len(came) > 10 or not _shares_memory(session)
        return found_by_way

    way = vars(Group)["reduces_parts"]
    for whole, parts in run_ranks(3, train, zero_lvl=2):  # uneven parts
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_gradients_that_only_one_rank_reads() -> None:
    def train(session: Session) -> Any:
        model, optimizer, x = _started()
        model(x).square().mean().backward()
        found = None
        if session.rank == 0:
            found = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return found, _weights(model)

    wanted = alone(train)
    found = run_ranks(2, train, zero_lvl=2)
    close(found[0], wanted)
    close(found[1][1], wanted[1])


@pytest.mark.forked  # a pickled function keeps the clip_grad_norm_ that it was made with
@pytest.mark.parametrize(
    "num_read", [1, pytest.param(6, marks=pytest.mark.soak)], ids=["one gradient", "all gradients"]
)
def test_clipping_after_one_rank_has_read_gradients(num_read: int) -> None:
    def train(session: Session) -> Any:
        model, optimizer, x = _started()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        norms = []
        for is_scaled in (False, True):
            loss = model(x).square().mean()
            (scaler.scale(loss) if is_scaled else loss).backward()
            if session.rank == 0:
                norms += [float(p.grad.norm()) for p in list(model.parameters())[:num_read]]
            if is_scaled:
                scaler.scale(model(x).mean()).backward()
                scaler.unscale_(optimizer)
            norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return norms, _weights(model)

    wanted = alone(train)
    found = run_ranks(2, train, zero_lvl=2)
    close(found[0], wanted)
    close(found[1], (wanted[0][num_read :: num_read + 1], wanted[1]))


@pytest.mark.parametrize("value", [pytest.param(None, marks=pytest.mark.soak), 0.5], ids=["dropped", "replaced"])
def test_writing_gradients_after_one_rank_has_read_one(value: float | None) -> None:
    def train(session: Session) -> Any:
        model, optimizer, x = _started()
        found = []
        for _step in range(3):
            model(x).square().mean().backward()
            if session.rank == 0:
                print(model[0].weight.grad.norm())
            optimizer.step()
            for p in model.parameters():
                p.grad = None if value is None else torch.full_like(p, value)
            found.append(float(clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.zero_grad()
            model(x).mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        return found, _weights(model)

    same(train, (2, 2))


def test_a_gradient_that_other_ranks_have_thrown_away_is_an_error() -> None:
    def train(session: Session) -> None:
        model, optimizer, x = _started()
        model(x).square().mean().backward()
        optimizer.step()
        if session.rank == 0:
            print(model[0].weight.grad)
        optimizer.zero_grad()
        model(x).square().mean().backward()

    with pytest.raises(RankFailedError, match=r"reads a gradient .* that other ranks do not come to"):
        run_ranks(2, train, zero_lvl=2)


@pytest.mark.soak
def test_a_gradient_that_one_rank_has_read_and_then_changed_in_place_is_an_error() -> None:
    def train(session: Session) -> None:
        model, optimizer, x = _started()
        model(x).square().mean().backward()
        if session.rank == 0:
            print(model[-1].weight.grad.norm())
        for p in model.parameters():
            p.grad.mul_(0.5)
        optimizer.step()

    with pytest.raises(RankFailedError, match=r"reads a gradient .* that other ranks do not come to"):
        run_ranks(2, train, zero_lvl=2)


@pytest.mark.soak
def test_where_something_is_compiled_gradients_stay_whole() -> None:
    def train(session: Session) -> Any:
        model, optimizer, x = _started()
        model(x).square().mean().backward()
        step = torch.compile(lambda one: one * 2, backend="eager")
        step(torch.ones(2))
        whole = [SLOT.__get__(p) is not None for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        whole += [SLOT.__get__(p) is not None for p in model.parameters()]
        optimizer.step()
        return whole, _weights(model)

    same(train, (2, 2))


def test_a_subscriber_finds_the_shards_when_a_backward_has_ended() -> None:
    def train(session: Session) -> list[int]:
        model, optimizer, x = _started()
        store, parameters = session.backwards.gradient_store, list(model.parameters())
        sizes: list[int] = []

        def add_sizes(gradients: Iterable[Tensor | None]) -> bool:
            sizes.append(sum(gradient.numel() for gradient in gradients if gradient is not None))
            return True

        def look() -> None:
            assert store.check_all(parameters, add_sizes, "a look")

        session.events.backward_ended.subscribe(look)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return sizes

    first, second = run_ranks(2, train, zero_lvl=2)
    num_elements = sum(p.numel() for p in _model().parameters())
    torch.set_default_dtype(torch.float32)
    assert [a + b for a, b in zip(first, second, strict=True)] == [num_elements] * 2
    assert 0 < first[0] < num_elements
