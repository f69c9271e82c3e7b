"""``BoundsCheck``: operations with indices out of bounds raise as on a CPU, before a GPU would end the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lagom.forward.rows.recorder import BoundsCheck, bounds_check

NAN = float("nan")
WRONG: dict[str, Callable[[], Tensor]] = {
    "an index": lambda: torch.ones(3)[torch.tensor([3])],
    "an index of the second dimension": lambda: torch.ones(2, 3)[:, torch.tensor([-4])],
    "assignment": lambda: torch.ones(3).index_put((torch.tensor([3]),), torch.ones(1)),
    "embedding": lambda: F.embedding(torch.tensor([-1]), torch.ones(4, 2)),
    "a bag of words": lambda: F.embedding_bag(torch.tensor([1, 4]), torch.ones(4, 2), torch.tensor([0, 2])),
    "an offset of bags": lambda: F.embedding_bag(torch.tensor([1, 2]), torch.ones(4, 2), torch.tensor([0, 3])),
    "gather": lambda: torch.ones(2, 3).gather(1, torch.tensor([[3]])),
    "index_add": lambda: torch.zeros(3).index_add(0, torch.tensor([3]), torch.ones(1)),
    "index_add in place": lambda: torch.zeros(3).index_add_(0, torch.tensor([-1]), torch.ones(1)),
    "scatter": lambda: torch.zeros(2, 3).scatter(1, torch.tensor([[3]]), torch.ones(1, 1)),
    "an index behind a mask": lambda: torch.ones(2, 3)[torch.tensor([True, True]), torch.tensor([0, 7])],
    "the only number": lambda: torch.tensor(1.0).index_select(0, torch.tensor([1])),
    "take": lambda: torch.ones(3).take(torch.tensor([-4])),
    "too many places": lambda: torch.zeros(3).masked_scatter(torch.tensor([True, True, False]), torch.ones(1)),
    "a rate": lambda: torch.poisson(torch.tensor([NAN])),
    "weights that are infinite": lambda: torch.multinomial(torch.tensor([float("inf"), 1.0]), 1),
    "weights that are zero": lambda: torch.multinomial(torch.zeros(2), 1),
    "a margin": lambda: F.multi_margin_loss(torch.ones(2, 3), torch.tensor([0, 3])),
    "a class": lambda: F.cross_entropy(torch.ones(2, 3), torch.tensor([0, 3])),
    "a class of pixels": lambda: F.cross_entropy(torch.ones(1, 3, 2, 2), torch.full((1, 2, 2), 3)),
    "bernoulli": lambda: torch.bernoulli(torch.tensor([NAN])),
    "bernoulli in place": lambda: torch.zeros(2).bernoulli_(torch.tensor([0.0, 2.0])),
    "multinomial": lambda: torch.multinomial(torch.tensor([NAN, 1.0]), 1),
    "a binary loss": lambda: F.binary_cross_entropy(torch.tensor([NAN]), torch.ones(1)),
}
RIGHT: dict[str, Callable[[], Tensor]] = {
    "an index from the end": lambda: torch.ones(3)[torch.tensor([-3])],
    "a mask": lambda: torch.ones(2, 3)[torch.tensor([[True, False, True], [False, True, False]])],
    "the second dimension": lambda: torch.arange(6).reshape(2, 3)[:, torch.tensor([2])],
    "filled from the end": lambda: torch.zeros(3).index_fill(0, torch.tensor([-1]), 1.0),
    "places for all numbers": lambda: torch.zeros(2, 3).masked_scatter(
        torch.tensor([True, False, True]), torch.ones(4)
    ),
    "an index behind a mask": lambda: torch.ones(2, 3)[torch.tensor([True, True]), torch.tensor([0, 2])],
    "no index": lambda: torch.ones(3)[torch.tensor([], dtype=torch.int64)],
    "dropout": lambda: F.dropout(torch.ones(8)),
    "bernoulli by a number": lambda: torch.full((3,), 5.0).bernoulli_(1.0),
    "an ignored class": lambda: F.cross_entropy(torch.ones(2, 3), torch.tensor([0, -100])),
    "one sample": lambda: F.cross_entropy(torch.ones(3), torch.tensor(2)),
    "bags": lambda: F.embedding_bag(torch.tensor([1, 2]), torch.ones(4, 2), torch.tensor([0, 2])),
    "weights of a draw": lambda: torch.multinomial(torch.tensor([0.0, 7.0]), 1),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_a_cpu_refuses_is_refused(call: Callable[[], Tensor]) -> None:
    # Without its kernels: on a GPU these would not raise, but end all work of the process.
    with BoundsCheck(), pytest.raises((IndexError, RuntimeError), match=r"not from|no probability|fewer numbers"):  # type: ignore[no-untyped-call]
        call()


@pytest.mark.parametrize("call", RIGHT.values(), ids=RIGHT)
def test_other_operations_give_what_they_give_without(call: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    wanted = call()
    torch.manual_seed(0)
    with BoundsCheck():  # type: ignore[no-untyped-call]
        assert torch.equal(call(), wanted)


def test_only_operations_of_a_gpu_are_checked() -> None:
    with bounds_check(torch.device("cpu")):
        assert torch._C._len_torch_dispatch_stack() == 0
    with bounds_check(torch.device("cuda")):
        assert torch._C._len_torch_dispatch_stack() == 1


def rnn_of_cudnn(data: Tensor, sizes: list[int]) -> Tensor:
    """Call cuDNN's layer, which no CPU has: beyond the check, torch says so."""
    state = torch.zeros(1, 2, 3)
    arguments = (0, None, state, None, 0, 3, 0, 1, False, 0.0, False, False, sizes, None)
    found: Tensor = torch.ops.aten._cudnn_rnn(data, [torch.zeros(1)] * 4, *arguments)[0]
    return found


def test_a_part_of_a_packed_sequence_does_not_get_to_cudnn() -> None:
    with BoundsCheck(), pytest.raises(RuntimeError, match="a packed sequence has 2 steps, and its sizes make 3"):  # type: ignore[no-untyped-call]
        rnn_of_cudnn(torch.ones(2, 4), [2, 1])
    for data, sizes in ((torch.ones(3, 4), [2, 1]), (torch.ones(5, 2, 4), [])):  # one that fits, and one not packed
        with BoundsCheck(), pytest.raises(NotImplementedError, match="_cudnn_rnn"):  # type: ignore[no-untyped-call]
            rnn_of_cudnn(data, sizes)
