"""``InputReads``: a forward that reads a number of its input is split, and reads that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.forward.rows.row_counts import counting_rows
from tests.ranks import alone, run_ranks

PADDING = [9]
"""The id of the padding, which ``Renamed`` reads and its program changes."""


class Masked(nn.Module):
    """Embeds ids, and takes the mean of those that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6).double(), nn.Linear(6, 3).double()

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.mean(self.table(ids), ids))

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the mean of the positions of each row."""
        if (ids != 0).all():
            return x.mean(1)
        mask = (ids != 0).unsqueeze(2)
        return (x * mask).sum(1) / mask.sum(1)


class Different(Masked):
    """Does something else, not only something faster, where the batch has no padding."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean(1) * 2 if not bool(ids.eq(0).any()) else x.mean(1)


class Longest(Masked):
    """Reads two numbers, of which the second depends on the first; one is a length."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = ids != 0
        longest = int(mask.sum(1).max())
        return x[:, :longest].mean(1) if mask[:, :longest].all() else x[:, :longest].sum(1)


class Expanded(Masked):
    """Makes a mask whose shape has sizes of the batch, as transformers do."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (ids != 0)[:, None, None, :].expand(rows, 1, length, length) & causal
        if mask.view(rows * length, length).any(1).all():
            return (x[:, None] * mask[:, 0, :, :, None]).sum(2).mean(1)
        return x.mean(1)


class InPlace(Masked):
    """Makes its mask by operations in place, on views."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        mask.view(-1)[:] = (ids == 0).flatten()
        mask[:, 0] = False
        mask |= ids == 8
        return x.mean(1) if mask.any() else x.sum(1)


class Buffered(Masked):
    """Compares with a buffer, and counts its calls in another."""

    def __init__(self) -> None:
        super().__init__()
        self.padding: Tensor
        self.calls: Tensor
        self.register_buffer("padding", torch.tensor(0))
        self.register_buffer("calls", torch.tensor(0))

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        return x.mean(1) if torch.equal(ids, ids.clamp(min=self.padding + 1)) else x.sum(1)


class Chosen(Masked):
    """Takes one position of each row, by an index of rows; no number is read."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[torch.arange(len(ids)), (ids != 0).sum(1) - 1]


class Renamed(Masked):
    """Compares with a number that its program changes, and that is no part of it."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean(1) * 3 if (ids == PADDING[0]).any() else x.mean(1)


class OfWeights(Masked):
    """Reads a number that depends on parameters."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean(1) if x.sum() > 0 else x.sum(1)


class Counted(Masked):
    """Reads how many times it was called from a buffer that it changes, and combines that with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        return x.mean(1) if (ids * self.calls < 8 * self.calls).all() else x.sum(1)


class CountedByOut(Counted):
    """Changes its buffer by an argument for the result."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        torch.add(self.calls, 1, out=self.calls)
        return x.mean(1) if (ids * self.calls < 8 * self.calls).all() else x.sum(1)


class Threshold(Masked):
    """Compares a mean with a number that comes from the length, and is not kept as a formula."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean(1) if (ids != 0).sum(1).double().mean() > 0.7 * ids.shape[1] else x.sum(1)


class OfFirst(Masked):
    """Compares all rows with the first, which another part does not have."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean(1) * 2 if (ids == ids[:1]).all() else x.mean(1) * 1


class Mixing(Masked):
    """Mixes the rows, by a number that it reads."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        found = x.mean(1)
        return found + 0.1 * found.mean(0) if (ids == 0).any() else found


class Checkpointed(Masked):
    """Reads in a part that is computed once more in the backward."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().mean, x, ids, use_reentrant=False)
        return found


class Repeated(Masked):
    """Reads in a part that a reentrant checkpoint computes once more in the backward."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().mean, x, ids, use_reentrant=True)
        return found


class Packed(Masked):
    """Packs its rows by their lengths: the result is as long as the longest row of a part."""

    def mean(self, x: Tensor, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0].mean(1)


SPLIT = [Masked, Different, Longest, Expanded, InPlace, Buffered, Chosen, Renamed]
WHOLE = {
    OfWeights: "reads a loss that it computes, or a sum or mean of its rows, and may decide by it; "
    "read it outside of the forward",
    Counted: "takes decisions by the numbers of its input",
    CountedByOut: "takes decisions by the numbers of its input",
    OfFirst: "takes decisions by the numbers of its input, which do not follow from those of a part",
    Threshold: "takes decisions by the numbers of its input",
    Mixing: "does not compute the rows of its batch one by one",
    Checkpointed: "takes decisions by the numbers of its input, which it computes at length",
    Repeated: "takes decisions by the numbers of its input, which it computes at length",
    Packed: "takes decisions by the numbers of its input",
}


def batches() -> list[Tensor]:
    """Make batches of 8 and 7 rows and several lengths, some with padding in the first or the last row only."""
    found = []
    for step in range(32):
        ids = torch.randint(1, 8, (8 - step % 2, 5 + 2 * (step % 16 > 11)))
        if step % 4 > 1:
            ids[0 if step % 8 > 3 else -1, 3:] = 0
        if step in (20, 21):  # all rows of a half are alike
            ids[: len(ids) // 2], ids[len(ids) // 2 :] = ids[:1].clone(), ids[-1:].clone()
        found.append(ids)
    return found


def trained(kind: type[Masked]) -> Callable[[Session], Any]:
    def program(session: Session) -> Any:
        from tests.forward.rows import test_input_reads as here  # ranks get this function with copies of its globals

        here.PADDING[0] = 9
        rows: list[int] = []
        torch.manual_seed(0)
        model = counting_rows(kind, rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step, ids in enumerate(batches()):
            if step == 24:
                here.PADDING[0] = 5
            loss = F.cross_entropy(model(ids), ids[:, 0] % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        reasons = sorted(text.partition(": it ")[2] for text in session.said if "runs whole" in text)
        return losses, reasons, rows

    return program


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", [*SPLIT, *WHOLE])
def test_a_forward_reads_the_numbers_of_the_whole_batch(kind: type[Masked], world_size: int) -> None:
    wanted, _, _ = alone(trained(kind))
    for found, reasons, rows in run_ranks(world_size, trained(kind), batches="whole", always_slices=True):
        assert found == pytest.approx(wanted, rel=1e-12)
        wanted_reasons = [WHOLE[kind]] if kind in WHOLE else []
        assert [one.partition(" (aten")[0] for one in reasons] == wanted_reasons
        assert (rows[-1] < 7) == (kind in SPLIT)


def test_an_evaluation_of_a_ranks_own_batch_chooses_no_way() -> None:
    """With "split" a rank may call its model with its share of a training batch, beside gathered batches."""

    def program(_: Session) -> Any:
        torch.manual_seed(0)
        model, data = Masked(), torch.randint(1, 8, (50, 5))
        data[::16, 1:] = 0
        sums = []
        for _epoch in range(2):
            model.train()
            for (batch,) in DataLoader(TensorDataset(data), batch_size=10):
                model(batch).sum().backward()
            model.eval()
            with torch.no_grad():
                for (rows,) in DataLoader(TensorDataset(data), batch_size=10):
                    sums.append(model(rows).sum().item())
                    model(batch)
        return sums

    wanted = alone(program)
    for found in run_ranks(2, program, batches="split", evaluation="gathered", always_slices=True):
        assert found == pytest.approx(wanted, rel=1e-12)
