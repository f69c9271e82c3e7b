"""``RowShardedTensor``: outputs that stay with the ranks are whole tensors for any program."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import LagomError
from lagom.row_split.row_sharded_tensor import RowShardedTensor
from lagom.row_split.whole_batch import RowExchange
from lagom.session.session import Session
from tests.ranks import alone, run_ranks

ROWS, CLASSES, TIME = 7, 6, 4
Look = Callable[[Tensor, Tensor], Any]
"""Computes something of outputs of shape (ROWS, TIME, CLASSES) and classes of shape (ROWS, TIME)."""


def made() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, its input of uneven rows, and classes."""
    draws = torch.Generator().manual_seed(5)
    torch.manual_seed(3)
    inputs = torch.randn(ROWS, TIME, 5, generator=draws, dtype=torch.float64)
    return nn.Linear(5, CLASSES).double(), inputs, torch.randint(CLASSES, (ROWS, TIME), generator=draws)


def look_at_all(session: Session) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Return what each of ``LOOKS`` finds, and the gradients of the model."""
    found = {}
    for name, look in LOOKS.items():
        model, inputs, classes = made()
        for _ in range(2):
            model(inputs)  # the second call is probed
        outputs = model(inputs)
        assert isinstance(outputs, RowShardedTensor) == (session.world_size > 1)
        value = look(outputs, classes)
        if value.requires_grad:
            value.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found[name] = value.detach().clone(), gradients
    return found


@pytest.fixture(scope="module")
def looks() -> tuple[Any, list[Any]]:
    """Return what ``look_at_all`` finds in one process and on each of three ranks."""
    return alone(look_at_all), run_ranks(3, look_at_all, batches="whole")


def flat(outputs: Tensor) -> Tensor:
    return outputs.view(-1, CLASSES)


def targets(outputs: Tensor) -> Tensor:
    return outputs.detach().cos() * 0.5 + 0.5


WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
LOOKS: dict[str, Look] = {
    "cross_entropy": lambda o, c: F.cross_entropy(flat(o), c.view(-1)),
    "cross_entropy_sum": lambda o, c: F.cross_entropy(flat(o), c.view(-1), reduction="sum"),
    "cross_entropy_none": lambda o, c: F.cross_entropy(flat(o), c.view(-1), reduction="none"),
    "cross_entropy_ignored": lambda o, c: F.cross_entropy(flat(o), c.view(-1), ignore_index=2),
    "cross_entropy_weighted": lambda o, c: F.cross_entropy(flat(o), c.view(-1), WEIGHT, ignore_index=3),
    "cross_entropy_smoothed": lambda o, c: F.cross_entropy(flat(o), c.view(-1), WEIGHT, label_smoothing=0.1),
    "cross_entropy_smoothed_ignored": lambda o, c: F.cross_entropy(
        flat(o), c.view(-1), ignore_index=1, label_smoothing=0.2
    ),
    "cross_entropy_ignored_by_one_rank": lambda o, c: F.cross_entropy(
        flat(o), c.view(-1).where(torch.arange(ROWS * TIME) > 9, -100)
    ),
    "cross_entropy_of_all_ignored": lambda o, c: F.cross_entropy(flat(o), torch.full((ROWS * TIME,), -100)).nan_to_num(
        7
    ),
    "cross_entropy_of_probabilities": lambda o, c: F.cross_entropy(flat(o), flat(targets(o)), WEIGHT),
    "cross_entropy_transposed": lambda o, c: F.cross_entropy(o.transpose(1, 2), c),
    "cross_entropy_module": lambda o, c: nn.CrossEntropyLoss(ignore_index=0)(o.transpose(1, 2), c),
    "cross_entropy_shifted": lambda o, c: F.cross_entropy(
        o[..., :-1, :].contiguous().view(-1, CLASSES), c[..., 1:].reshape(-1)
    ),
    "cross_entropy_shifted_and_reshaped": lambda o, c: F.cross_entropy(
        o[:, :-1].reshape(-1, CLASSES), c[:, 1:].reshape(-1)
    ),
    "nll": lambda o, c: F.nll_loss(F.log_softmax(flat(o), dim=-1), c.flatten(), WEIGHT),
    "nll_of_nd": lambda o, c: F.nll_loss(o.log_softmax(2).transpose(1, 2), c, ignore_index=1),
    "mse": lambda o, c: F.mse_loss(o, targets(o)),
    "mse_of_targets_first": lambda o, c: F.mse_loss(targets(o), o),
    "mse_broadcast": lambda o, c: F.mse_loss(o, targets(o)[:1].expand_as(o)),
    "mse_none_masked": lambda o, c: (F.mse_loss(o, targets(o), reduction="none")[:, :, 0] * (c > 2)).sum() / 5,
    "l1": lambda o, c: nn.L1Loss()(o, targets(o)),
    "smooth_l1": lambda o, c: F.smooth_l1_loss(o, targets(o), reduction="sum", beta=0.1),
    "huber": lambda o, c: nn.HuberLoss()(o, targets(o)),
    "kl_batchmean": lambda o, c: F.kl_div(o.log_softmax(-1), targets(o), reduction="batchmean"),
    "bce": lambda o, c: F.binary_cross_entropy(o.softmax(-1), targets(o)),
    "bce_weighted": lambda o, c: F.binary_cross_entropy_with_logits(o, targets(o), weight=targets(o)),
    "bce_pos_weight": lambda o, c: F.binary_cross_entropy_with_logits(o, targets(o), pos_weight=WEIGHT),
    "bce_pos_weight_of_rows": lambda o, c: F.binary_cross_entropy_with_logits(o, targets(o), pos_weight=targets(o) + 1),
    "sum_of_losses": lambda o, c: (
        F.cross_entropy(flat(o), c.view(-1)) + 0.3 * F.mse_loss(o, targets(o)) + o.pow(2).mean()
    ),
    "times_itself": lambda o, c: F.cross_entropy(flat(o), c.view(-1)) ** 2,
}


def second_gradient(outputs: Tensor, classes: Tensor) -> Tensor:
    loss = F.cross_entropy(flat(outputs), classes.view(-1))
    (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
    return loss + gradient.pow(2).sum()


def retained(outputs: Tensor, classes: Tensor) -> Tensor:
    loss = F.cross_entropy(flat(outputs), classes.view(-1))
    outputs.retain_grad()  # after the loss
    loss.backward(retain_graph=True)
    assert outputs.grad is not None
    return outputs.grad.clone()


def hooked(outputs: Tensor, classes: Tensor) -> Tensor:
    seen: list[Tensor] = []
    view = flat(outputs)
    view.register_hook(lambda gradient: seen.append(gradient.clone()))
    outputs.register_hook(lambda gradient: gradient * 2)
    (F.cross_entropy(view, classes.view(-1)) + view[::2].sum() / 9).backward(retain_graph=True)
    return torch.cat([one.detach() for one in seen])


def changed_in_place(outputs: Tensor, classes: Tensor) -> Tensor:
    view = outputs[:, 1:]
    view.mul_(2)
    outputs[:, 0] += 1
    outputs.clamp_(max=1)
    return F.cross_entropy(flat(outputs), classes.view(-1)) + view.sum()


def changed_base(outputs: Tensor, classes: Tensor) -> Tensor:
    view = flat(outputs)
    outputs += 1
    return F.mse_loss(view, flat(targets(outputs)))


class Square(torch.autograd.Function):
    """x², without Python's operators on the way in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def saved(outputs: Tensor, classes: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(outputs.detach(), file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(outputs.detach())))
    assert type(loaded) is type(copied) is Tensor
    return loaded + copied


def without_gradients(outputs: Tensor, classes: Tensor) -> Tensor:
    with torch.no_grad():
        correct = (outputs.argmax(-1) == classes).sum()
        probabilities = torch.softmax(outputs, dim=2)
    return correct + probabilities + outputs.detach()


def becomes_a_leaf(outputs: Tensor, classes: Tensor) -> Tensor:
    frozen = outputs.detach()
    frozen.requires_grad_()
    F.cross_entropy(flat(frozen), classes.view(-1)).backward()
    assert frozen.grad is not None
    return frozen.grad.clone()


def becomes_a_leaf_and_is_looked_at(outputs: Tensor, classes: Tensor) -> Tensor:
    first, second = outputs.detach(), outputs.detach()
    first.requires_grad = True
    (first * 2).sin().sum().backward()
    second.requires_grad_()
    second.pow(2).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    total: Tensor = first.grad + second.grad
    return total


def checkpointed(outputs: Tensor, classes: Tensor) -> Tensor:
    scale = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True)
    product = checkpoint(lambda x: (x * scale).exp(), outputs, use_reentrant=True)
    assert isinstance(product, Tensor)
    product.mean().backward(retain_graph=True)
    assert scale.grad is not None
    loss: Tensor = checkpoint(lambda x: F.cross_entropy(flat(x), classes.view(-1)), outputs, use_reentrant=False)
    return scale.grad + loss


class Detached(torch.autograd.Function):
    """A function that returns a view of its input, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


def returned_by_a_function(outputs: Tensor, classes: Tensor) -> Tensor:
    found: Tensor = Detached.apply(outputs)  # type: ignore[no-untyped-call]
    return F.cross_entropy(flat(found), classes.view(-1)) + found.sin().sum() + flat(found).cos().sum()


def in_inference_mode(outputs: Tensor, classes: Tensor) -> Tensor:
    model, inputs, _ = made()
    with torch.inference_mode():
        found = [model(inputs) for _ in range(3)][-1]
        loss = F.cross_entropy(flat(found), classes.view(-1))
    value: Tensor = loss.clone() + (found.argmax(2) == classes).sum() + found.clone()
    return value


def wrong_class(outputs: Tensor, classes: Tensor) -> Tensor:
    wrong = classes.clone()
    wrong[-1, -1] = CLASSES
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        F.cross_entropy(flat(outputs), wrong.view(-1))
    return F.cross_entropy(flat(outputs), classes.view(-1))


LOOKS |= {
    "numpy": lambda o, c: torch.from_numpy(np.asarray(o.detach()).cumsum(0)),
    "tolist": lambda o, c: torch.tensor(o.tolist()),
    "item": lambda o, c: torch.tensor(o[2, 1, 3].item() + float(o.detach()[0, 0, 0])),
    "text": lambda o, c: torch.tensor(len(str(o.detach())) + len(f"{o.shape} {o[0, 0, 0]:.3f}")),
    "rows": lambda o, c: torch.stack(list(o)[::-1]),
    "mask": lambda o, c: o[c > 2],
    "gather": lambda o, c: o.gather(2, c[..., None]).mean(),
    "arithmetic": lambda o, c: 2 - o / 3 + o * o,
    "cat": lambda o, c: torch.cat([o, o.detach()], dim=1),
    "sorted": lambda o, c: o.sort(0).values[0],
    "views": lambda o, c: o.flatten(1)[:, 3:9].transpose(0, 1) @ o.reshape(ROWS, -1)[:, -4:],
    "other_shape": lambda o, c: o.view(2, -1).sum(1) * o.view(-1).logsumexp(0),
    "own_function": lambda o, c: Square.apply(o),  # type: ignore[no-untyped-call]
    "vmap": lambda o, c: torch.func.vmap(lambda row: row.sum() * row[0, 0])(o),
    "second_gradient": second_gradient,
    "retained": retained,
    "hooked": hooked,
    "changed_in_place": changed_in_place,
    "changed_base": changed_base,
    "saved": saved,
    "without_gradients": without_gradients,
    "becomes_a_leaf": becomes_a_leaf,
    "becomes_a_leaf_and_is_looked_at": becomes_a_leaf_and_is_looked_at,
    "checkpointed": checkpointed,
    "returned_by_a_function": returned_by_a_function,
    "in_inference_mode": in_inference_mode,
    "wrong_class": wrong_class,
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_program_finds_the_numbers_and_gradients_of_one_process(name: str, looks: tuple[Any, list[Any]]) -> None:
    value, gradients = looks[0][name]
    for found, its_gradients in (of_rank[name] for of_rank in looks[1]):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
        assert len(its_gradients) == len(gradients)
        for one, other in zip(its_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def stacked(session: Session) -> Any:
    """Train two models one after the other; return losses, weights, and what was gathered in the last epoch."""
    torch.manual_seed(1)
    first = nn.Linear(5, 8).double()
    second = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    draws = torch.Generator().manual_seed(2)
    points = torch.randn(22, 5, generator=draws, dtype=torch.float64)
    data = TensorDataset(points, torch.randint(CLASSES, (22,), generator=draws))
    losses: list[float] = []
    for epoch in range(4):
        with pytest.MonkeyPatch.context() as patch:
            sizes: list[int] = []
            if epoch == 3:
                record_sizes(patch, sizes)
            for x, y in DataLoader(data, batch_size=8, shuffle=True):
                optimizer.zero_grad()
                loss = F.cross_entropy(second(first(x)), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses, [p.detach().clone() for p in parameters], sizes


def record_sizes(patch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Record how many numbers each tensor has that this rank gives to others."""
    original = RowExchange.gather

    def gather(exchange: RowExchange, tensors: Any, *args: Any) -> list[Tensor]:
        sizes.extend(tensor.numel() for tensor in tensors)
        return original(exchange, tensors, *args)

    patch.setattr(RowExchange, "gather", gather)


def test_a_model_takes_the_rows_of_another_and_only_sums_of_losses_travel() -> None:
    losses, weights, _ = alone(stacked)
    for found, its_weights, sizes in run_ranks(2, stacked, batches="whole"):
        assert found == pytest.approx(losses, rel=1e-12)
        for one, other in zip(its_weights, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert sizes
        assert set(sizes) == {1}


def test_outputs_are_whole_where_the_program_ends_and_in_workers_of_a_loader() -> None:
    def program(session: Session) -> Any:
        model, inputs, _ = made()
        with torch.no_grad():
            outputs = [model(inputs) for _ in range(3)][-1]
        assert isinstance(outputs, RowShardedTensor) == (session.world_size > 1)
        read = [one.sum().item() for (one,) in DataLoader(TensorDataset(outputs), batch_size=2, num_workers=1)]
        return read, {"outputs": model(inputs)}

    (expected, values) = alone(program)
    for read, found in run_ranks(2, program, batches="whole"):
        assert read == expected
        assert type(found["outputs"]) is Tensor
        assert torch.equal(found["outputs"], values["outputs"])


def test_outputs_are_ordinary_tensors_once_a_function_is_compiled() -> None:
    def program(session: Session) -> Any:
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of .grad
        model, inputs, classes = made()
        loss_of = torch.compile(lambda outputs: F.cross_entropy(flat(outputs), classes.view(-1)), backend="eager")
        outputs = [model(inputs) for _ in range(3)][-1]
        loss_of(outputs).backward()
        return type(outputs) is Tensor, model.weight.grad

    _, expected = alone(program)
    for is_plain, found in run_ranks(2, program, batches="whole"):
        assert is_plain
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_change_of_an_outputs_memory_is_refused() -> None:
    def program(_: Session) -> str:
        model, inputs, _classes = made()
        outputs = [model(inputs) for _ in range(3)][-1]
        with pytest.raises(LagomError, match="memory of a model's output is replaced") as caught:
            outputs.data = torch.zeros(1)
        return str(caught.value)

    assert len(run_ranks(2, program, batches="whole")) == 2


def test_small_outputs_are_gathered_at_once() -> None:
    def program(_: Session) -> Any:
        wide = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 64))
        wider = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024))
        inputs = torch.randn(256, 64)
        with torch.no_grad():
            return [type([model(inputs) for _ in range(3)][-1]).__name__ for model in (wide, wider)]

    assert run_ranks(2, program, batches="whole", always_slices=False)[0] == ["Tensor", "RowShardedTensor"]


def test_a_forward_whose_outputs_are_looked_at_is_sliced_only_if_that_pays_for_their_way() -> None:
    def program(_: Session) -> list[str]:
        model, inputs = nn.Linear(48, 4096), torch.randn(1024, 48)
        kinds = []
        with torch.no_grad():
            for number in range(5):
                outputs = model(inputs)
                kinds.append(type(outputs).__name__)
                if number == 2:
                    outputs.sum()
        return kinds

    sharded = "RowShardedTensor"
    expected = ["Tensor", sharded, sharded, "Tensor", "Tensor"]
    assert run_ranks(2, program, batches="whole", always_slices=False) == [expected] * 2
