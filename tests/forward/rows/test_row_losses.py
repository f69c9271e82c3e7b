"""``row_losses``: a loss of which each rank computes its rows, and all else that programs do with outputs.

Numbers are those of one process.
"""

from __future__ import annotations

import copy
import io
import itertools
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

from lagom.disk.install import asked_for_rank
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


def look_at_all(session: Session) -> dict[str, tuple[Tensor, list[Tensor], bool]]:
    """Return what each of ``LOOKS`` finds, the gradients of the model, and whether a loss was shared out."""
    found = {}
    model, inputs, classes = made()
    for _ in range(2):
        model(inputs)  # the second call is probed
    for name, look in LOOKS.items():
        model.zero_grad()
        outputs = model(inputs)
        value = look(outputs, classes)
        shared = is_shared(value)
        if value.requires_grad:
            value.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found[name] = value.detach().clone(), gradients, shared
    return found


def is_shared(value: Tensor) -> bool:
    """Return whether the graph of ``value`` has a loss that ranks have shared out."""
    pending, seen = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
    return any(node.name() == "EndFunctionBackward" for node in seen)


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
    "kl_batchmean_of_outputs": lambda o, c: F.kl_div(o, targets(o), reduction="batchmean"),
    "kl_of_logs": lambda o, c: F.kl_div(o, targets(o).log(), reduction="sum", log_target=True),
    "one_cast": lambda o, c: F.mse_loss(o.float(), targets(o).float()).double() * 1e-9,
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


def many_steps(outputs: Tensor, classes: Tensor) -> Tensor:
    view = outputs
    for _ in range(16):
        view = view.clone()
    loss = F.mse_loss(view, targets(outputs))
    view.register_hook(lambda gradient: gradient * 3)
    return loss


def seen_by_a_hook_of_a_view(outputs: Tensor, classes: Tensor) -> Tensor:
    seen: list[Tensor] = []
    flatten = nn.Flatten(0, 1)
    flatten.register_backward_hook(lambda module, gradients, its: seen.append(its[0].clone()))  # type: ignore[index]
    F.cross_entropy(flatten(outputs), classes.view(-1)).backward(retain_graph=True)
    return seen[0]


def changed_after_it_was_saved(outputs: Tensor, classes: Tensor) -> Tensor:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = F.mse_loss(outputs, targets(outputs))
        with torch.no_grad():
            outputs.mul_(3)
        loss.backward(retain_graph=True)
    return loss.detach()


def cut_by_a_script(outputs: Tensor, classes: Tensor) -> Tensor:
    cut: Tensor = torch.ops.aten.slice.Tensor(outputs, 1, None, -1)
    return F.cross_entropy(cut.transpose(1, 2), classes[:, 1:])


LOOKS |= {
    "many_steps": many_steps,
    "changed_after_it_was_saved": changed_after_it_was_saved,
    "cut_by_a_script": cut_by_a_script,
    "rounded_twice": lambda o, c: F.mse_loss(o.half().double(), targets(o) * 1e-3),
    "best_of_targets": lambda o, c: torch.vmap(lambda t: F.l1_loss(o, t))(torch.stack([targets(o), o.detach()])).min(),
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
    "seen_by_a_hook_of_a_view": seen_by_a_hook_of_a_view,  # after it no loss is shared out
}


SHARED = {name for name in LOOKS if name.startswith("cross_entropy")} | {
    *("mse", "mse_broadcast", "l1", "smooth_l1", "huber", "bce_pos_weight", "sum_of_losses", "times_itself"),
    *(
        "kl_batchmean_of_outputs",
        "kl_of_logs",
        "many_steps",
        "one_cast",
        "second_gradient",
        "checkpointed",
        "wrong_class",
        "cut_by_a_script",
    ),
}
"""Programs whose value has a loss of rows in its graph."""


@pytest.mark.parametrize("name", LOOKS)
def test_a_program_finds_the_numbers_and_gradients_of_one_process(name: str, looks: tuple[Any, list[Any]]) -> None:
    known = SHARED - {"cross_entropy_shifted_and_reshaped"} if torch.__version__.startswith("2.6.") else SHARED
    value, gradients, _ = looks[0][name]
    for found, its_gradients, shared in (of_rank[name] for of_rank in looks[1]):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
        assert shared == (name in known)
        assert len(its_gradients) == len(gradients)
        for one, other in zip(its_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.soak
def test_a_loss_that_is_compiled_or_scripted_is_that_of_one_process() -> None:
    def program(_: Session) -> Any:
        warnings.simplefilter("ignore")  # torch's own, of .grad and of TorchScript
        model, inputs, classes = made()

        def loss_of(outputs: Tensor, classes: Tensor) -> Tensor:
            return F.cross_entropy(outputs.view(-1, 6), classes.view(-1))

        found = []
        for changed in (torch.compile(loss_of, backend="eager"), torch.jit.script(loss_of)):
            outputs = [model(inputs) for _ in range(3)][-1]
            loss = changed(outputs, classes)
            loss.backward()
            found.append(loss.item())
        return found, model.weight.grad

    losses, gradient = alone(program)
    for found, its_gradient in run_ranks(2, program, batches="whole"):
        assert found == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-12, atol=1e-12)


def test_losses_are_printed_as_in_one_process() -> None:
    def program(_: Session) -> Any:
        model, inputs, classes = made()
        outputs = [model(inputs) for _ in range(3)][-1]
        found = flat(outputs)
        return [str(loss) for loss in (F.cross_entropy(found, classes.view(-1)), F.mse_loss(outputs, targets(outputs)))]

    expected = alone(program)
    assert run_ranks(2, program, batches="whole") == [expected, expected]


def test_losses_of_classes_have_the_bits_of_torchs() -> None:
    def program(_: Session) -> Any:
        torch.manual_seed(0)
        model, inputs = nn.Linear(5, CLASSES), torch.randn(41, 30, 5)
        outputs = [model(inputs) for _ in range(3)][-1]
        classes = torch.randint(CLASSES, (41, 30)).masked_fill(torch.rand(41, 30) < 0.3, -100)
        found = []
        for reduction, weight in itertools.product(("mean", "sum"), (None, torch.rand(CLASSES))):
            for scores, labels in ((outputs.flatten(0, 1), classes.flatten()), (outputs.transpose(1, 2), classes)):
                shared = F.cross_entropy(scores, labels, weight, reduction=reduction)
                whole = F.cross_entropy(scores.detach(), labels, weight, reduction=reduction)
                found.append((is_shared(shared), torch.equal(shared, whole)))
        return found

    assert run_ranks(3, program, batches="whole") == [[(True, True)] * 8] * 3


@pytest.mark.soak  # test_slicer.py has forwards that do not pay by default
def test_only_the_loss_of_large_outputs_is_shared_out() -> None:
    def program(_: Session) -> Any:
        inputs, classes = torch.randn(256, 64), torch.randint(64, (256,))
        found = []
        for width in (64, 1024):
            hidden = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
            model = nn.Sequential(hidden, nn.Linear(2048, width))
            outputs = [model(inputs) for _ in range(3)][-1]
            found.append(is_shared(F.cross_entropy(outputs, classes)))
        return found

    assert run_ranks(2, program, batches="whole", always_slices=False) == [[False, True]] * 2


def test_losses_of_16_bits_are_computed_whole() -> None:
    def program(_: Session) -> Any:
        model, inputs, classes = made()
        model.bfloat16()
        outputs = [model(inputs.bfloat16()) for _ in range(3)][-1]
        loss = F.cross_entropy(flat(outputs), classes.view(-1))
        with torch.autocast("cpu", torch.bfloat16):
            converted = F.cross_entropy(flat(outputs), classes.view(-1))
        return is_shared(loss), is_shared(converted), loss.item()

    (_, _, expected) = alone(program)
    assert run_ranks(2, program, batches="whole") == [(False, True, expected)] * 2


def test_a_program_that_knows_its_rank_may_compute_a_loss_on_one() -> None:
    def program(session: Session) -> Any:
        model, inputs, classes = made()
        outputs = [model(inputs) for _ in range(3)][-1]
        asked_for_rank()
        if session.rank == 0:
            return F.cross_entropy(flat(outputs), classes.view(-1)).item()
        return None

    first, second = run_ranks(2, program, batches="whole")
    assert first == pytest.approx(alone(program), rel=1e-12)
    assert second is None


def test_large_outputs_are_those_of_one_process_where_their_numbers_are_lazily_conjugated() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 40_000).double()

        def forward(self, x: Tensor) -> Any:
            hidden = self.body(x)
            return torch.fft.rfft(hidden).conj(), torch._neg_view(hidden)

    def program(_: Session) -> Any:
        torch.manual_seed(0)
        model, inputs = Spectrum(), torch.randn(8, 8, dtype=torch.float64)
        spectrum, negative = [model(inputs) for _ in range(3)][-1]
        return spectrum.detach().resolve_conj(), negative.detach().resolve_neg()

    expected = alone(program)
    for found in run_ranks(2, program, batches="whole"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_losses_are_pickled_by_name() -> None:
    def program(_: Session) -> Any:
        return [pickle.loads(pickle.dumps(one)) is one for one in (torch.kl_div, torch._C._nn.mse_loss)]

    assert run_ranks(2, program, batches="whole") == [[True, True]] * 2


def test_large_outputs_can_be_changed_in_place() -> None:
    def program(_: Session) -> Any:
        torch.manual_seed(0)
        model, inputs = nn.Linear(6, 30_000).double(), torch.randn(8, 6, dtype=torch.float64)
        outputs = [model(inputs) for _ in range(3)][-1]
        outputs.mul_(2)
        outputs[:, 0] = 0
        F.relu_(outputs).sum().backward()
        return model.weight.grad

    expected = alone(program)
    for found in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_several_gradients_at_once_of_a_shared_loss_are_those_of_one_process() -> None:
    def program(_: Session) -> Any:
        model, inputs, classes = made()
        outputs = [model(inputs) for _ in range(3)][-1]
        losses = F.cross_entropy(flat(outputs), classes.view(-1), reduction="none")[:5]
        return torch.autograd.grad(losses, list(model.parameters()), torch.eye(5).double(), is_grads_batched=True)

    expected = alone(program)
    for found in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_that_are_zero_and_have_no_memory_travel() -> None:
    def program(_: Session) -> Any:
        torch.manual_seed(0)
        model, inputs = nn.Linear(6, 30_000).double(), torch.randn(8, 6, dtype=torch.float64)
        outputs = [model(inputs) for _ in range(3)][-1]
        (gradient,) = torch.autograd.grad(F.l1_loss(outputs, torch.zeros_like(outputs)), outputs, create_graph=True)
        (F.mse_loss(outputs, torch.ones_like(outputs)) + gradient.pow(2).sum()).backward()
        return model.weight.grad

    expected = alone(program)
    for found in run_ranks(2, program, batches="whole"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
