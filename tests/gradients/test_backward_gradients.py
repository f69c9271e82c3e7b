"""``lagom.gradients.backward_gradients``: hooks of leaves see the gradient of the whole batch, as on one machine."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import alone, check_against_one_process, run_ranks
from tests.session.programs import Program, data, mlp, mse, sgd, weights


def hooks_in_order(_: Session) -> list[Tensor]:
    model: Any = mlp()
    log: list[Tensor] = []
    p = model[0].weight
    p.register_hook(lambda grad: grad.sign())
    removed = p.register_hook(lambda grad: grad * 0)
    p.register_hook(lambda grad: grad.cumsum(0))
    removed.remove()
    for place, each in enumerate(model.parameters()):
        each.register_post_accumulate_grad_hook(lambda leaf, place=place: log.append(torch.tensor(place)))
    return sgd(model, mse(model)) + log


def optimizer_in_the_backward(_: Session) -> list[Tensor]:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in DataLoader(data(), batch_size=6):
        mse(model)(x, y).backward()
        assert all(p.grad is None for p in model.parameters())
    return weights(model)


def optimizer_in_hooks_of_nodes(_: Session) -> list[Tensor]:
    """The idiom before torch had ``register_post_accumulate_grad_hook``."""
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}
    nodes: list[Any] = [p.expand_as(p).grad_fn.next_functions[0][0] for p in optimizers]  # type: ignore[union-attr]

    def step(p: Any) -> None:
        p.grad.copy_(p.grad.sign() * p.grad.abs().sqrt())
        optimizers[p].step()
        p.grad = None

    for p, node in zip(optimizers, nodes, strict=True):
        node.register_hook(lambda *_, p=p: step(p))
    for x, y in DataLoader(data(), batch_size=6):
        mse(model)(x, y).backward()
        assert all(p.grad is None for p in optimizers)
    return weights(model)


def hooks_of_leaves_and_nodes(_: Session) -> list[Tensor]:
    """All four kinds of hooks of a leaf, while gradients accumulate."""
    model: Any = mlp()
    p, seen = model[0].weight, []
    node = p.view_as(p).grad_fn.next_functions[0][0]

    def after(inputs: tuple[()], outputs: tuple[Tensor | None]) -> None:
        seen.append(p.grad.clone())
        seen.extend(one.clone() for one in (*inputs, *outputs) if one is not None)

    node.register_hook(after)
    node.register_prehook(lambda outputs: (outputs[0].sign(),))
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    p.register_hook(lambda grad: grad.cumsum(0))
    removed = node.register_prehook(lambda outputs: (outputs[0] * 0,))
    removed.remove()
    for x, y in DataLoader(data(), batch_size=6):
        mse(model)(x, y).backward()
    node.register_prehook(lambda outputs: (None,))
    mse(model)(x, y).backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + seen


def hooks_of_several_tensors(_: Session) -> list[Tensor]:
    """Hooks of leaves alone, of a leaf that no backward reaches, and of an activation with a leaf."""
    model: Any = mlp()
    seen: list[Tensor] = []

    def note(grads: Any) -> None:
        seen.append(torch.tensor([one is not None for one in grads]))
        seen.extend(one.clone() for one in grads if one is not None)

    leaves = list(model.parameters())
    first, last = leaves[0], leaves[-1]
    register_multi_grad_hook(leaves, note)
    register_multi_grad_hook((first, last), lambda grad: seen.append(grad.clone()), mode="any")
    register_multi_grad_hook((nn.Parameter(torch.ones(1)), last), note)
    for x, y in DataLoader(data(), batch_size=6):
        out = model(x)
        register_multi_grad_hook((out, first), lambda grads: seen.append(grads[1].clone()))
        nn.functional.mse_loss(out, y).backward()
    removed = register_multi_grad_hook(leaves, lambda _: seen.clear())
    removed.remove()
    mse(model)(x, y).backward(inputs=[last])
    return seen + [leaf.grad for leaf in leaves]


def hooks_while_accumulating(_: Session) -> list[Tensor]:
    model: Any = mlp()
    seen: list[Tensor] = []
    for p in model.parameters():
        p.register_hook(lambda grad: grad.sign() * grad.abs().sqrt())
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for x, y in DataLoader(data(), batch_size=6):
        mse(model)(x, y).backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + seen


def accumulating_in_place(_: Session) -> list[Tensor]:
    model = mlp()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    for x, y in DataLoader(data(), batch_size=5):
        mse(model)(x, y).backward()
    return [flat]


def hooks_with_a_reentrant_checkpoint(_: Session) -> list[Tensor]:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
    return sgd(model, mse(lambda x: model[2](checkpoint(model[:2], x.requires_grad_(), use_reentrant=True))))


def hooks_with_inputs(_: Session) -> list[Tensor]:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.sign())
    x, y = next(iter(DataLoader(data(), batch_size=9)))
    mse(model)(x, y).backward(inputs=[model[0].weight])
    assert model[2].weight.grad is None
    return [model[0].weight.grad]  # type: ignore[list-item]


def differentiated_again(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data(), batch_size=5):  # the last has 4 samples
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle
            mse(model)(x, y).backward(create_graph=True)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        (mse(model)(x, y) + sum(grad.square().sum() for grad in gradients)).backward()
        optimizer.step()
    return weights(model)


def differentiated_where_samples_choose_the_layer(kinds: tuple[type[nn.Module], type[nn.Module]]) -> list[Tensor]:
    """Each sample reaches a layer of its own."""
    experts = [nn.Sequential(nn.Linear(2, 3), kind(), nn.Linear(3, 1)).double() for kind in kinds]
    optimizer = torch.optim.SGD([p for expert in experts for p in expert.parameters()], 0.1)
    x = torch.randn(8, 2, dtype=torch.float64)
    x[:, 0] = torch.tensor([1.0, -1.0]).repeat(4)
    for (rows,) in DataLoader(TensorDataset(x), batch_size=2):

        def loss(rows: Tensor = rows) -> Tensor:
            return torch.cat([experts[int(row[0, 0] < 0)](row) for row in rows.split(1)]).mean()

        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle
            loss().backward(create_graph=True)
        gradients = [p.grad for p in optimizer.param_groups[0]["params"]]
        optimizer.zero_grad()
        (loss() + sum(grad.square().sum() for grad in gradients)).backward()
        optimizer.step()
    return weights(*experts)


PROGRAMS: list[Program] = [
    hooks_in_order,
    optimizer_in_the_backward,
    optimizer_in_hooks_of_nodes,
    hooks_of_leaves_and_nodes,
    hooks_of_several_tensors,
    hooks_while_accumulating,
    accumulating_in_place,
    hooks_with_a_reentrant_checkpoint,
    hooks_with_inputs,
    differentiated_again,
]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(  # a test below differentiates again
    "program",
    [
        pytest.param(one, id=one.__name__, marks=pytest.mark.soak if one is differentiated_again else ())
        for one in PROGRAMS
    ],
)
def test_the_gradients_are_those_of_one_machine(program: Program, world_size: int) -> None:
    check_against_one_process(program, world_size)


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_so_are_the_gradients_of_whole_batches(program: Program) -> None:
    check_against_one_process(program, batches="whole")


@pytest.mark.parametrize(
    "kinds",
    [pytest.param((nn.Tanh, nn.Tanh), marks=pytest.mark.soak), (nn.Tanh, nn.Identity)],
    ids=["alike", "one without a graph"],
)
def test_gradients_of_layers_that_samples_choose_can_be_differentiated(kinds: Any) -> None:
    check_against_one_process(lambda _: differentiated_where_samples_choose_the_layer(kinds))


def test_hooks_of_leaves_that_only_another_rank_reaches_are_called() -> None:
    def run(session: Session) -> Any:
        experts = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        for expert in experts:
            expert.grad = torch.full((1,), 10.0)
            expert.register_hook(lambda grad: grad.square())
        (experts[session.rank] * 3).sum().backward()
        return [expert.grad.item() for expert in experts if expert.grad is not None]

    assert run_ranks(2, run) == [[10 + 1.5**2] * 2] * 2


def test_hooks_stay_where_they_are_whatever_happens() -> None:
    def run(session: Session) -> Any:
        p = nn.Parameter(torch.ones(1))
        calls = []
        handles = [p.register_hook(lambda grad: calls.append("first"))]

        def failing(_: Tensor) -> None:
            calls.append("failing")
            raise ZeroDivisionError

        handles.append(p.register_hook(failing))
        p.grad = torch.full((1,), 5.0)
        with pytest.raises(ZeroDivisionError):
            (p * 2).sum().backward()
        assert p.grad.item() == 5
        middle = p * 2
        middle.register_hook(failing)
        with pytest.raises(ZeroDivisionError):
            middle.sum().backward()
        assert p.grad.item() == 5
        handles[1].remove()
        (p * (2 + session.rank)).sum().backward()
        assert p._backward_hooks is not None
        assert list(p._backward_hooks) == [handles[0].id]
        return p.grad.item(), calls

    assert run_ranks(2, run) == [(7.5, ["first", "failing", "failing", "first"])] * 2


def test_a_hook_that_is_removed_during_the_backward_is_not_called() -> None:
    def run(session: Session) -> Any:
        p = nn.Parameter(torch.ones(1))
        handle = p.register_hook(lambda grad: grad * 100)
        middle = p * 2
        middle.register_hook(lambda _: handle.remove())
        middle.sum().backward()
        assert p.grad is not None
        return p.grad.item(), dict(p._backward_hooks or {})

    assert run_ranks(2, run) == [(2.0, {})] * 2


def test_a_hook_of_several_leaves_is_called_once_if_ranks_reach_different_ones() -> None:
    def run(session: Session) -> list[list[float]]:
        experts = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        seen: list[list[float]] = []
        register_multi_grad_hook(experts, lambda grads: seen.append([0.0 if g is None else g.item() for g in grads]))
        (experts[session.rank] * 3).sum().backward()
        return seen

    assert run_ranks(2, run) == [[[1.5, 1.5, 0.0]]] * 2


def test_a_hook_may_run_a_backward_of_its_own() -> None:
    def run(session: Session) -> Any:
        p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

        def again(p: Any) -> None:
            with torch.enable_grad():
                (q * p.grad * (1 + session.rank)).sum().backward()

        p.register_post_accumulate_grad_hook(again)
        (p * session.rank).sum().backward()
        assert p.grad is not None
        assert q.grad is not None
        return p.grad.item(), q.grad.item()

    assert run_ranks(2, run) == [(0.5, 0.75)] * 2


def test_a_hook_that_gives_something_fails_as_in_torch() -> None:
    def program(_: Session) -> list[str]:
        model: Any = mlp()
        x, y = next(iter(DataLoader(data(), batch_size=6)))
        p, texts = model[0].weight, []
        node = p.view_as(p).grad_fn.next_functions[0][0]

        def two(gradients: tuple[Tensor]) -> tuple[Tensor, Tensor]:
            return gradients * 2

        for register, hook in (
            (p.register_post_accumulate_grad_hook, lambda p: p.grad.mul_(0.9)),
            (node.register_prehook, lambda gradients: gradients[0]),
            (node.register_prehook, two),
        ):
            handle = register(hook)
            with pytest.raises((RuntimeError, TypeError)) as failed:
                mse(model)(x, y).backward()
            handle.remove()
            texts.append(str(failed.value))
        return texts

    assert run_ranks(2, program) == [alone(program)] * 2
