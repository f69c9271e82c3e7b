"""``lagom.gradients.autograd_grad``: ``torch.autograd.grad`` gives for parameters what it gives on one machine."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from lagom.config.torch_distributed import Batches
from lagom.errors import DivergenceError
from lagom.session.session import Session
from tests.ranks import alone, check_against_one_process, run_ranks
from tests.session.programs import Program, data, mlp, mse, weights


def loader(batch_size: int = 5) -> DataLoader[Any]:
    return DataLoader(data(14), batch_size=batch_size)  # the last has 4 samples, or 2


def plain_leaves(_: Session) -> list[Tensor]:
    w = torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    b = torch.randn(7, 1, dtype=torch.float64).requires_grad_()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    for x, y in loader(4):
        gradients = torch.autograd.grad((scale * torch.tanh(x @ w) @ b - y).square().mean(), [w, b, scale])
        with torch.no_grad():
            for leaf, gradient in zip((w, b, scale), gradients, strict=True):
                leaf -= 0.1 * gradient
    return [w.detach(), b.detach(), scale.detach()]


def meta_learning(_: Session) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = list(loader())
    for (x, y), (x2, y2) in zip(batches, batches[1:] + batches[:1], strict=True):
        fast: dict[str, Any] = dict(model.named_parameters())
        for _step in range(3):
            loss = nn.functional.mse_loss(functional_call(model, fast, (x,)), y)
            gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.5 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
        optimizer.zero_grad()
        nn.functional.mse_loss(functional_call(model, fast, (x2,)), y2).backward()
        optimizer.step()
    return weights(model)


def first_order_meta_learning(_: Session) -> list[Tensor]:
    model = mlp()
    for x, y in loader():
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for _step in range(2):
            loss = nn.functional.mse_loss(functional_call(model, fast, (x,)), y)
            gradients = torch.autograd.grad(loss, list(fast.values()))
            with torch.no_grad():
                for p, g in zip(fast.values(), gradients, strict=True):
                    p -= 0.5 * g
        with torch.no_grad():
            for slow, p in zip(model.parameters(), fast.values(), strict=True):
                slow.add_(p - slow, alpha=0.5)
    return weights(model)


def hessian_times_vector(_: Session) -> list[Tensor]:
    model = mlp()
    parameters = list(model.parameters())
    found: list[Tensor] = []
    for x, y in loader():
        gradients = torch.autograd.grad(mse(model)(x, y), parameters, create_graph=True)
        found += torch.autograd.grad([g.sin().sum() for g in gradients], parameters, create_graph=True)
        found += torch.autograd.grad([g.square().sum() for g in found[-len(parameters) :]], parameters)
    return [each.detach() for each in found]


def slopes(_: Session) -> list[Tensor]:
    """A differential equation: inputs of one number a row, whose gradients meet values in the loss."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader():
        t = x[:, :1].clone().requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
        optimizer.zero_grad()
        (slope + u - y).square().mean().backward()
        optimizer.step()
    return weights(model)


def with_hooks(_: Session) -> list[Tensor]:
    model: Any = mlp()
    model[0].weight.register_hook(lambda grad: grad.sign())
    model[0].weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    x, y = next(iter(loader()))
    return list(torch.autograd.grad(mse(model)(x, y), [model[0].weight, model[0].bias]))


def two_loaders(_: Session) -> list[Tensor]:
    """Differentiate batches of which a rank has shares of different weights: together, and one after the other."""
    model = mlp()
    one, other = DataLoader(data(13), batch_size=5), DataLoader(data(18), batch_size=6)
    for (x, y), (x2, y2) in zip(one, other, strict=True):
        first, second = mse(model)(x, y), nn.functional.l1_loss(model(x2), y2)
        together = torch.autograd.grad(first - 0.3 * second, list(model.parameters()), retain_graph=True)
        earlier = torch.autograd.grad(first, list(model.parameters()))
        with torch.no_grad():
            for p, g, g2 in zip(model.parameters(), together, earlier, strict=True):
                p.sub_(g + g2, alpha=0.1)
    return weights(model)


def tied_with_a_hook(_: Session) -> list[Tensor]:
    encoder, decoder = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
    decoder.weight = encoder.weight
    calls: list[Tensor] = []
    found: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        calls.append(gradient.clone())
        return gradient.sign()

    encoder.weight.register_hook(hook)
    for x, _y in loader():
        loss = nn.functional.mse_loss(decoder(torch.tanh(encoder(x))), x)
        found += torch.autograd.grad(loss, [*encoder.parameters(), *decoder.parameters()])
    return found + calls


def penalty_where_samples_choose_the_layer(_: Session) -> list[Tensor]:
    """Each sample reaches a layer of its own; only one of these layers has a gradient that depends on parameters."""
    experts = [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), nn.Linear(2, 1).double()]
    parameters = [p for expert in experts for p in expert.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    x = torch.randn(8, 2, dtype=torch.float64)
    x[:, 0] = torch.tensor([1.0, -1.0]).repeat(4)
    for (rows,) in DataLoader(TensorDataset(x), batch_size=2):
        loss = torch.cat([experts[int(row[0, 0] < 0)](row) for row in rows.split(1)]).mean()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        optimizer.zero_grad()
        (loss + sum(g.square().sum() for g in gradients if g is not None)).backward()
        optimizer.step()
    return weights(*experts)


PROGRAMS: list[Program] = [
    two_loaders,
    tied_with_a_hook,
    plain_leaves,
    meta_learning,
    first_order_meta_learning,
    hessian_times_vector,
    slopes,
    with_hooks,
]
AS_OTHERS = (first_order_meta_learning, hessian_times_vector)
"""These run with ``-m soak``."""


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "program",
    [pytest.param(one, id=one.__name__, marks=pytest.mark.soak if one in AS_OTHERS else ()) for one in PROGRAMS],
)
def test_the_result_is_that_of_one_machine(program: Program, world_size: int) -> None:
    check_against_one_process(program, world_size)


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_so_is_the_result_of_whole_batches(program: Program) -> None:
    check_against_one_process(program, batches="whole")


@pytest.mark.parametrize("program", [meta_learning, with_hooks], ids=lambda program: program.__name__)
def test_world_1_is_bit_identical(program: Program) -> None:
    for found, wanted in zip(run_ranks(1, program)[0], alone(program), strict=True):
        assert torch.equal(found, wanted)


def test_a_penalty_where_samples_choose_the_layer_is_that_of_one_machine() -> None:
    check_against_one_process(penalty_where_samples_choose_the_layer)


def test_gradients_of_outputs_beside_those_of_parameters_are_the_ranks_own() -> None:
    def run(_: Session) -> None:
        model = mlp()
        one, other = DataLoader(data(13), batch_size=5), DataLoader(data(18), batch_size=6)
        for (x, y), (x2, y2) in zip(one, other, strict=True):
            outputs = model(x), model(x2)
            loss = nn.functional.mse_loss(outputs[0], y) + nn.functional.mse_loss(outputs[1], y2)
            found = torch.autograd.grad(loss, [*outputs, *model.parameters()], retain_graph=True)
            torch.testing.assert_close(found[:2], torch.autograd.grad(loss, outputs), rtol=0, atol=1e-15)

    run_ranks(2, run)


def test_what_only_some_ranks_use_counts_as_zero_on_the_others() -> None:
    def run(session: Session) -> Any:
        used, table = nn.Parameter(torch.ones(2)), nn.Embedding(3, 1, sparse=True)
        nothing, rarely = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
        loss = used.sum() + (rarely * 3).sum() if session.rank == 0 else used.sum() * 3
        if session.rank == 0:
            loss = loss + table(torch.tensor([1, 1])).sum()
        found = torch.autograd.grad(loss, [used, nothing, rarely, table.weight], allow_unused=True)
        assert all(p.grad is None for p in (used, nothing, rarely, table.weight))
        return [None if g is None else g.to_dense().tolist() for g in found]

    assert run_ranks(2, run) == [[[2, 2], None, [1.5] * 3, [[0], [1], [0]]]] * 2


def test_ranks_that_ask_for_different_gradients_are_told() -> None:
    def run(session: Session) -> str:
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        with pytest.raises(DivergenceError) as caught:
            torch.autograd.grad((a * b).sum(), [b if session.rank else a])
        return str(caught.value)

    assert all("different parameters on different ranks" in text for text in run_ranks(3, run))


def test_a_gradient_is_not_mixed_up_with_that_of_a_backward() -> None:
    def run(session: Session) -> str:
        a = nn.Parameter(torch.ones(1))
        run = a.sum().backward if session.rank else lambda: torch.autograd.grad(a.sum(), [a])
        with pytest.raises(DivergenceError) as caught:
            run()
        return str(caught.value)

    assert all("rank 0 at torch.autograd.grad, rank 1 at a backward" in text for text in run_ranks(2, run))


def test_gradients_of_data_are_the_ranks_own_and_cost_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session) -> Any:
        assert session.group is not None
        (x,) = next(iter(DataLoader(TensorDataset(torch.arange(10.0).view(5, 2)), batch_size=5)))
        delta = torch.zeros_like(x, requires_grad=True)  # equal on all ranks
        monkeypatch.setattr(session.group, "exchange", None)
        (found,) = torch.autograd.grad(((x + delta) ** 2).sum(), delta)
        (by_activation,) = torch.autograd.grad((delta.exp() * x).sum(), (middle := delta.exp(),), allow_unused=True)
        assert by_activation is None
        assert middle.requires_grad
        monkeypatch.undo()
        return torch.equal(found, 2 * x)

    assert run_ranks(2, run) == [True, True]


def test_plain_leaves_that_differ_keep_their_own_gradients() -> None:
    def run(session: Session) -> Any:
        x, _ = next(iter(loader(8)))
        own = torch.full((3,), 1.0 + session.rank, requires_grad=True)
        shared = nn.Parameter(torch.ones(1))
        found = torch.autograd.grad((own.square() * shared).sum() * (session.rank + 1), [own, shared])
        assert len(x)
        return [each.tolist() for each in found]

    expected = (3 * 1 + 2 * 3 * 4) / 2
    assert run_ranks(2, run) == [[[2.0] * 3, [expected]], [[8.0] * 3, [expected]]]


def test_gradients_per_sample_are_left_alone() -> None:
    def run(session: Session) -> Any:
        model = nn.Linear(2, 3)
        x = torch.full((1, 2), 1.0 + session.rank)
        (rows,) = torch.autograd.grad(model(x)[0], [model.weight], torch.eye(3), is_grads_batched=True)
        return rows[0, 0].tolist()

    assert run_ranks(2, run) == [[1.0, 1.0], [2.0, 2.0]]


def batched_second_derivatives(_: Session) -> list[Tensor]:
    """Hessians of leaves, of a Parameter and of a model's weights, and what is trained by one of them."""
    leaf = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    found = list(torch.autograd.grad(gradient, leaf, torch.eye(2, dtype=leaf.dtype), is_grads_batched=True))
    model = mlp()
    names = list(model.parameters())
    for x, y in loader():
        by_weight, _bias = torch.autograd.grad(mse(model)(x, y), [names[0], names[-1]], create_graph=True)
        (several,) = torch.func.vmap(
            lambda root, out=by_weight, leaf=names[0]: torch.autograd.grad(out, leaf, root, retain_graph=True)
        )(torch.ones_like(by_weight).expand(2, *by_weight.shape))
        roots = torch.eye(by_weight.numel(), dtype=x.dtype)[:3]
        (rows,) = torch.autograd.grad(by_weight.flatten(), names[0], roots, is_grads_batched=True)
        found += [rows, several]
        with torch.no_grad():
            names[0].sub_(rows.sum(0), alpha=0.01)
    return [each.detach() for each in found]


@pytest.mark.parametrize("batches", ["whole", "split"])
def test_batched_second_derivatives_are_those_of_one_machine(batches: Batches) -> None:
    check_against_one_process(batched_second_derivatives, batches=batches)


@pytest.mark.soak
def test_batched_second_derivatives_on_three_ranks() -> None:
    check_against_one_process(batched_second_derivatives, 3, batches="whole")


def after_a_backward_with_a_graph(_: Session) -> list[Tensor]:
    model = mlp()
    weight = next(model.parameters())
    found: list[Tensor] = []
    for x, y in loader():
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle
            mse(model)(x, y).backward(create_graph=True)
        assert weight.grad is not None
        roots = torch.eye(weight.numel(), dtype=x.dtype)[:2]
        found += torch.autograd.grad(weight.grad.flatten(), weight, roots, is_grads_batched=True)
    model.zero_grad()  # the graph of a gradient holds its leaf
    return found


def test_a_gradient_with_a_graph_has_batched_derivatives() -> None:
    check_against_one_process(after_a_backward_with_a_graph, batches="whole")


def test_gradients_through_batchnorm_of_several_outputs_at_once_are_the_rank_s_own() -> None:
    def run(_: Session) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
        weight, found = next(model.parameters()), []
        for x, _ in loader(4):
            sums = model(x).sum(0)
            several = torch.autograd.grad(sums, weight, torch.eye(3).double(), retain_graph=True, is_grads_batched=True)
            sums.sum().backward()
            found.append(several[0])
        return found

    wanted = alone(run)
    for mine, other, whole in zip(*run_ranks(2, run), wanted, strict=True):
        torch.testing.assert_close(mine + other, whole, rtol=0, atol=1e-12)


def sparse_leaves(_: Session) -> list[Tensor]:
    """Gradients of sparse leaves, and of a number that is gathered."""
    leaf = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
    found = torch.autograd.grad((leaf.to_dense() ** 2).sum(), leaf)
    trained = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
    torch.sparse.mm(trained, torch.ones(3, 3, dtype=torch.float64)).sum().backward()
    dense = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
    dense.mm(torch.ones(3, 3, dtype=torch.float64)).sum().backward()
    number = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    torch.gather(number, 0, torch.tensor(0), sparse_grad=True).backward()
    assert trained.grad is not None
    assert dense.grad is not None
    assert not dense.grad.is_sparse
    assert number.grad is not None
    return [one.to_dense() for one in (*found, trained.grad, dense.grad, number.grad)]


def leaves_in_the_layout_of_onednn(_: Session) -> list[Tensor]:
    """A leaf that is trained twice, and one that only ``torch.autograd.grad`` knows; oneDNN has no float64."""
    leaf, trained = (torch.arange(1.0, 4.0).to_mkldnn().requires_grad_() for _ in range(2))
    optimizer = torch.optim.SGD([trained], 0.5)
    found = torch.autograd.grad((leaf.to_dense() ** 2).sum(), leaf)
    for x, _y in DataLoader(TensorDataset(torch.arange(6.0), torch.zeros(6)), batch_size=2):
        (trained.to_dense() * x.sum()).sum().backward()
        optimizer.step()
    assert trained.grad is not None
    return [one.detach().to_dense() for one in (*found, trained, trained.grad)]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_leaves_in_the_layout_of_onednn_are_trained_as_in_one_process(world_size: int) -> None:
    check_against_one_process(leaves_in_the_layout_of_onednn, world_size, batches="whole")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_leaf_in_the_layout_of_onednn_that_only_another_rank_reaches_gets_its_half() -> None:
    def run(session: Session) -> list[float]:
        leaves = [nn.Parameter(torch.ones(2).to_mkldnn()) for _ in range(2)]
        (leaves[session.rank].to_dense() * 3).sum().backward()
        return [leaf.grad.to_dense().sum().item() for leaf in leaves if leaf.grad is not None]

    assert run_ranks(2, run) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_sparse_leaves_are_trained_as_in_one_process(world_size: int) -> None:
    check_against_one_process(sparse_leaves, world_size, batches="whole")
