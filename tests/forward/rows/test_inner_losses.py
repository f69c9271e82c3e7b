"""Losses that a model computes in its forward: a split forward gives those of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lagom.session.session import Session
from tests.forward.rows.row_counts import counting_rows
from tests.ranks import RankFailedError, alone, run_ranks


class Labelled(nn.Module):
    """Returns its scores and, where it gets labels, their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8).double(), nn.Linear(8, 12).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.head(self.body(x).tanh())
        return {"scores": scores} if labels is None else {"loss": self.loss(scores, labels, x), "scores": scores}

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        """Return the loss of ``scores`` of shape (rows, 12), and labels of shape (rows, 3)."""
        return F.cross_entropy(scores.view(-1, 4), labels.view(-1))


class Ignoring(Labelled):
    """Some labels count for nothing, in one rank's rows more than in another's; classes have weights."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        return F.cross_entropy(scores.view(-1, 4), labels.where(labels > 0, -100).view(-1), weight)


class Smoothed(Labelled):
    """Classes at the end of several dimensions, with label smoothing."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        labels = labels.where(x[:, :3] > -0.5, -100)
        return F.cross_entropy(scores.view(-1, 3, 4).transpose(1, 2), labels, label_smoothing=0.1)


class Combined(Labelled):
    """A sum, a mean of squares, and a penalty for weights, which has no rows."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        entropy = F.cross_entropy(scores.view(-1, 4), labels.view(-1), reduction="sum") / 20
        penalty = F.mse_loss(self.body.weight, torch.zeros(8, 5, dtype=torch.float64))
        return entropy + 0.1 * F.mse_loss(scores[:, :5], x) + penalty


class Dropped(Labelled):
    """Draws random numbers before its loss, and reads a number of its input."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        if (labels == 0).all():
            return super().loss(scores, labels, x)
        return super().loss(F.dropout(scores, 0.3, self.training), labels, x)


class Weighted(Labelled):
    """Weighs the classes that the batch has; mostly each half of it has all."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        weight = 0.5 + (labels.flatten()[:, None] == torch.arange(4)).any(0).double()
        return F.cross_entropy(scores.view(-1, 4), labels.view(-1), weight)


class Normalised(Labelled):
    """Divides by the largest number of the batch, once that is large, and returns its loss alone."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        hidden = self.body(x)
        hidden = hidden / hidden.abs().max().clamp(min=6.0)
        return {"loss": self.loss(self.head(hidden), labels, x), "scores": torch.zeros(())}


class Scaled(Labelled):
    """Multiplies what it returns for rows by the loss of the batch."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.head(self.body(x).tanh())
        assert labels is not None
        loss = F.l1_loss(scores[:, :5], x)
        return {"loss": (scores * loss).square().mean(1), "scores": scores}


class Probable(Labelled):
    """Targets are probabilities."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores[:, :5], x.sigmoid(), pos_weight=torch.ones(5).double() * 2)


class Averaged(Labelled):
    """Averages the losses of rows itself, each with its own weight."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        losses = F.mse_loss(scores[:, :5], x, reduction="none").flatten(1).mean(1)
        return (losses * (1 + x[:, 0].square())).mean()


class Noisy(Labelled):
    """Scales rows by numbers from a table at random places, which do not come from its input."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        scale = torch.linspace(0.1, 1, 4, dtype=torch.float64)[torch.randint(0, 4, (len(x),))]
        losses = (scores * scale[:, None]).square().mean(1)
        return (losses * (1 + scale)).mean()


class Masked(Labelled):
    """Divides the sum of some tokens' losses by their number, of which a rank may have none."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        losses = F.cross_entropy(scores.view(-1, 4), labels.view(-1), reduction="none").view(labels.shape)
        mask = (labels < 2) & (x[:, :1] > 0.9)
        return (losses * mask).sum() / mask.sum().clamp(min=1) + 0.01 * losses.sum((0, -1))


class Large(Labelled):
    """Averages more numbers than ranks exchange, and sums them."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        distances = (scores.unsqueeze(2) - torch.linspace(-1, 1, 1300, dtype=torch.float64)).square()
        counts = (distances.detach() < 0.1).sum()
        return distances.cos().mean([0, 1, 2]) + 1e-6 * torch.sum(distances) + counts / 1e5


class Counted(Labelled):
    """Reads the number of some labels, and divides by another one; averages a statistic that it does not use."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        scores.abs().mean()
        losses = F.cross_entropy(scores.view(-1, 4), labels.view(-1), reduction="none")
        return losses.mean() if int((labels > 4).sum()) == 0 else losses.sum()


class Statistical(Labelled):
    """Returns the mean of its rows beside them, and a count in a tensor."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.head(self.body(x).tanh())
        targets = labels if labels is not None else torch.ones(len(x), 3).long()
        return {"loss": (scores.square().mean(1) * (targets > 0).sum(1)).mean(), "scores": (targets > 1).sum()}


class Penalised(Labelled):
    """Adds a sum and a divergence of weights, which have no rows, before the loss of its rows."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        penalty = self.body.weight.square().sum() + int((labels > 4).sum())
        return 0.01 * penalty + F.cross_entropy(scores.view(-1, 4), labels.view(-1))


class Divergent(Labelled):
    """Computes a loss of weights, which is composed of torch's operations, before the mean of its rows."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        even = torch.full((8, 5), 0.2, dtype=torch.float64)
        return F.kl_div(self.body.weight.log_softmax(1), even, reduction="sum") + scores.square().mean()


class Mapped(Labelled):
    """Averages inside a transform, for each row alone."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        means: Tensor = torch.vmap(lambda row: row.square().mean())(scores)
        return means.mean()


class Recomputed(Labelled):
    """Computes rows again in the backward, beside a statistic that it does not use."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = checkpoint(lambda rows: self.head(self.body(rows).tanh()), x, use_reentrant=False)
        scores.detach().abs().mean()
        return {"loss": scores.square().mean(1), "scores": scores}


class Wrong(Labelled):
    """Has labels that torch refuses in the last row of the second last batch."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return super().forward(x, labels + 9 * (x[:, :1] > 100))


class Divided(Labelled):
    """Divides rows by their sum."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return (scores / (1 + scores.square().sum())).square().mean()


class Sized(Labelled):
    """Divides a sum by the number of rows, which is another one on each rank."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return scores.square().sum() / len(x)


class Across(Labelled):
    """Averages pairs of rows."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return (scores @ scores.T).exp().mean()


class Paired(Labelled):
    """Compares each row with all others: not a sum over rows."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return F.cross_entropy(scores @ scores.T, torch.arange(len(x)))


class Listed(Labelled):
    """Sums the losses itself."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return F.cross_entropy(scores.view(-1, 4), labels.view(-1), reduction="none").max()


class Read(Labelled):
    """Reads its loss, and decides by it."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        loss = super().loss(scores, labels, x)
        return loss * 2 if loss.item() > 1.4 else loss


class Kept(Labelled):
    """Keeps its loss, with the graph of its rows."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        self.last = super().loss(scores, labels, x)
        return self.last


SPLIT = [
    *(Labelled, Ignoring, Smoothed, Combined, Dropped, Probable, Wrong),
    *(Averaged, Noisy, Masked, Large, Counted, Statistical, Penalised, Divergent, Mapped, Recomputed),
]
WHOLE = {
    Weighted: "computes a loss in its forward, which is not the sum or mean of its rows' losses",
    Normalised: "does not compute the rows of its batch one by one",
    Scaled: "computes its rows from a loss, sum or mean of the batch",
    Divided: "computes its rows from a loss, sum or mean of the batch",
    Sized: "does not compute the rows of its batch one by one",
    Across: "does not compute the rows of its batch one by one",
    Paired: "does not compute the rows of its batch one by one",
    Listed: "gives an output of shape (), not one with a row for each of 7",
    Read: "reads a loss that it computes, or a sum or mean of its rows, and may decide by it; "
    "read it outside of the forward",
    Kept: "keeps a tensor of its forward beside its output, which would be of a part of the batch; "
    "return the tensor as well",
}


def trained(kind: type[nn.Module]) -> Callable[[Session], Any]:
    def program(session: Session) -> Any:
        rows: list[int] = []
        torch.manual_seed(0)
        model = counting_rows(kind, rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(10):
            x = torch.randn(8 - step % 2, 5, dtype=torch.float64)
            x[-1, 0] += 1000 * (step == 8)
            try:
                output = model(x, torch.randint(0, 4, (len(x), 3)))
            except IndexError as error:
                found.append(str(error))
                continue
            optimizer.zero_grad()
            output["loss"].sum().backward()
            optimizer.step()
            found += [
                output["loss"].sum().item(),
                output["scores"].sum().item(),
                str(output["loss"])[-20:] * (kind not in (Scaled, Recomputed)),
            ]
        with torch.no_grad():
            model.eval()
            output = [model(torch.randn(7, 5).double(), torch.ones(7, 3).long())["loss"].sum().item() for _ in "12"]
        reasons = sorted(text.partition(": it ")[2] for text in session.said if "runs whole" in text)
        return [*found, *output], reasons, rows

    return program


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", [*SPLIT, *WHOLE])
def test_a_loss_in_a_forward_is_that_of_the_whole_batch(kind: type[nn.Module], world_size: int) -> None:
    wanted, _, _ = alone(trained(kind))
    for found, reasons, rows in run_ranks(world_size, trained(kind), batches="whole", always_slices=True):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one == (other if isinstance(other, str) else pytest.approx(other, rel=1e-12))
        assert reasons == ([WHOLE[kind]] if kind in WHOLE else [])
        assert (rows[-1] < 7) == (kind in [*SPLIT, Kept])  # without gradients there is no graph to keep


STEP = [1]
"""The number of a call, by which a forward computes another loss; the program changes it."""


class Growing(Labelled):
    """Adds a loss from the fourth call on, and returns its loss alone."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        scores = self.head(self.body(x)).tanh()
        loss = self.loss(scores, labels, x)
        return loss + F.mse_loss(scores[:, :5], x) if STEP[0] > 3 else loss


def test_a_loss_that_was_not_in_the_probe_is_that_of_the_whole_batch() -> None:
    def program(_: Session) -> list[float]:
        from tests.forward.rows import test_inner_losses as here  # ranks get this function with copies of its globals

        torch.manual_seed(0)
        model, losses = Growing().eval(), []
        with torch.no_grad():  # with gradients, the nodes of another loss are counted
            for step in range(1, 9):
                here.STEP[0] = step
                x, labels = torch.randn(8, 5, dtype=torch.float64), torch.randint(0, 4, (8, 3))
                losses.append(model(x, labels).item())
        return losses

    wanted = alone(program)
    for losses in run_ranks(2, program, batches="whole", always_slices=True):
        assert losses == pytest.approx(wanted, rel=1e-12)


class Doubled(Labelled):
    """Doubles its loss for batches with a label that the program changes, and returns it alone."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        loss = self.loss(self.head(self.body(x)), labels, x)
        return loss * 2 if (labels == STEP[0]).any() else loss * 1


def test_a_number_that_is_out_of_date_is_noticed_where_a_loss_is_the_only_output() -> None:
    def program(_: Session) -> list[float]:
        from tests.forward.rows import test_inner_losses as here  # ranks get this function with copies of its globals

        torch.manual_seed(0)
        model, losses = Doubled(), []
        for step in range(8):
            here.STEP[0] = 9 if step < 5 else 1
            loss = model(torch.randn(8, 5, dtype=torch.float64), torch.randint(0, 4, (8, 3)))
            loss.backward()
            losses.append(loss.item())
        return losses

    wanted = alone(program)
    for losses in run_ranks(2, program, batches="whole", always_slices=True):
        assert losses == pytest.approx(wanted, rel=1e-12)


class Gated(Labelled):
    """Mixes its rows once its program opens a gate, and returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Tensor
        self.register_buffer("gate", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        hidden = self.body(x)
        return self.loss(self.head(hidden - self.gate * hidden.mean(0)), labels, x)


def test_rows_that_mix_later_are_found_behind_a_loss_alone() -> None:
    def program(_: Session) -> list[float]:
        torch.manual_seed(0)
        model, losses = Gated(), []
        for step in range(8):
            if step == 5:
                model.gate.fill_(0.5)
            loss = model(torch.randn(8, 5, dtype=torch.float64), torch.randint(0, 4, (8, 3)))
            loss.backward()
            losses.append(loss.item())
        return losses

    wanted = alone(program)
    for losses in run_ranks(2, program, batches="whole", always_slices=True):
        assert losses == pytest.approx(wanted, rel=1e-12)


class Annealed(Labelled):
    """Divides by its number of rows a sum that counts for nothing until the program opens a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Tensor
        self.register_buffer("gate", torch.zeros((), dtype=torch.float64))


class DividedSum(Annealed):
    """Divides the sum."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return scores.cos().mean() + self.gate * scores.square().sum() / len(x)


class DividedByTensor(Annealed):
    """Divides the sum by a tensor."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return scores.cos().mean() + (self.gate * scores.square().sum() / torch.tensor([len(x), 2.0])).sum()


class DividedRows(Annealed):
    """Divides the rows."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return scores.cos().mean() + torch.relu((self.gate - 1 + scores.tanh()) / len(x)).sum()


@pytest.mark.parametrize("kind", [DividedSum, DividedByTensor, DividedRows])
def test_a_sum_of_zero_is_not_divided_by_the_rows_of_a_rank(kind: type[Annealed]) -> None:
    def program(_: Session) -> list[float]:
        torch.manual_seed(0)
        model, losses = kind(), []
        for step in range(8):
            if step == 5:
                model.gate.fill_(0.5)
            loss = model(torch.randn(8, 5, dtype=torch.float64), torch.randint(0, 4, (8, 3)))["loss"]
            loss.backward()
            losses.append(loss.item())
        return losses

    wanted = alone(program)
    for losses in run_ranks(2, program, batches="whole", always_slices=True):
        assert losses == pytest.approx(wanted, rel=1e-12)


class Single(nn.Module):
    """Adds single numbers in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.body(x).square().sum(dtype=torch.float64)
        return total


def test_a_sum_keeps_its_type_when_rows_get_large() -> None:
    def program(_: Session) -> list[tuple[float, torch.dtype]]:
        torch.manual_seed(0)
        model, found = Single(), []
        for step in range(8):
            loss = model(torch.randn(8, 10 if step < 6 else 500, 5))
            loss.backward()
            found.append((loss.item(), loss.dtype))
        return found

    wanted = alone(program)
    for found in run_ranks(2, program, batches="whole", always_slices=True):
        assert [dtype for _, dtype in found] == [dtype for _, dtype in wanted]
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=1e-12)


class Compiled(Labelled):
    """Adds rows in compiled code and beside it."""

    def loss(self, scores: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        return scores.square().mean() + mean_of_cosines(scores) + (scores.abs().mean(1) * 0.1).sum()


@torch.compile(backend="eager")
def mean_of_cosines(scores: Tensor) -> Tensor:
    return scores.cos().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_sums_in_compiled_code_are_those_of_the_whole_batch() -> None:
    def program(_: Session) -> list[float]:
        torch.manual_seed(0)
        model, losses = Compiled(), []
        for _step in range(6):
            loss = model(torch.randn(8, 5, dtype=torch.float64), torch.randint(0, 4, (8, 3)))["loss"]
            loss.backward()
            losses.append(loss.item())
        return losses

    wanted = alone(program)
    for losses in run_ranks(2, program, batches="whole", always_slices=True):
        assert losses == pytest.approx(wanted, rel=1e-12)


class Looking(Labelled):
    """Looks up its labels, which may be no index in the rows of one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 12).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return self.loss(self.head(self.body(x)) + self.table(labels).sum(1), labels, x)


def test_losses_of_two_batches_are_not_added() -> None:
    """A rank alone skips a batch that fails on its rows; the next exchange says so, whatever the shapes."""

    def program(_: Session) -> None:
        torch.manual_seed(0)
        model = Looking()
        for step in range(6):
            labels = torch.randint(0, 4, (8, 3))
            labels[-1, -1] += 9 * (step == 4)
            with contextlib.suppress(IndexError):
                model(torch.randn(8, 5, dtype=torch.float64), labels).backward()

    with pytest.raises(RankFailedError, match="the sum of a loss: its input is not the same on all ranks"):
        run_ranks(2, program, batches="whole", always_slices=True)
