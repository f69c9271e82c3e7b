"""``Draws``: the same numbers and graphs with a dispatch mode, and with watched operations only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lagom.forward.rows.draws import BranchMismatchError, Draws, UnsupportedDrawError, draw_shape, draws_random_numbers
from lagom.forward.rows.whole_batch import RowBlock

BLOCK = RowBlock(1, 2, 7)
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": F.dropout,
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rand": lambda x: torch.rand(len(x), 5) + x,
    "randn_like": lambda x: torch.randn_like(x) * x,
    "in place": lambda x: (x + 1).uniform_(),
    "torch.func": lambda x: torch.vmap(lambda row: row + torch.rand_like(row), randomness="different")(x),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_and_graph_are_those_of_a_mode(draw: Callable[[Tensor], Any]) -> None:
    found = []
    for by_mode in (True, False):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, BLOCK.num_mine * 5).view(BLOCK.num_mine, 5).requires_grad_()
        axes = {(f"aten.{name}", dims): 0 for name in NAMES for dims in (2, 3, 4)}
        with Draws(BLOCK, axes, []).entered(by_mode=by_mode):
            result = draw(x)
        found.append((result, *torch.autograd.grad(result.sum(), x), torch.get_rng_state()))
        assert not torch.equal(found[-1][-1], torch.Generator().manual_seed(3).get_state())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert nodes(found[0][0]) == nodes(found[1][0])


NAMES = (
    *("bernoulli_.float", "native_dropout.default", "rand.default", "rand_like.default", "randn_like.default"),
    "uniform_.default",
)


def nodes(result: Tensor) -> list[str]:
    """Return the names of the graph's nodes behind ``result``."""
    names, left = [], [result.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.append(node.name())
            left += [following for following, _ in node.next_functions]
    return names


@pytest.mark.parametrize("inner_by_mode", [True, False])
@pytest.mark.parametrize("outer_by_mode", [True, False])
def test_a_micro_batch_of_a_ranks_rows_draws_for_the_whole_batch(outer_by_mode: bool, inner_by_mode: bool) -> None:
    axes = {("aten.bernoulli_.float", 2): 0}
    outer, inner = Draws(RowBlock(1, 2, 8), axes), Draws(RowBlock(0, 2, 4), axes)
    torch.manual_seed(3)
    wanted = torch.empty(8, 5).bernoulli_(0.3)[4:6], torch.get_rng_state()
    torch.manual_seed(3)
    with outer.entered(by_mode=outer_by_mode), inner.entered(by_mode=inner_by_mode):
        found = torch.empty(2, 5).bernoulli_(0.3)
    assert torch.equal(found, wanted[0])
    assert torch.equal(torch.get_rng_state(), wanted[1])


class Described(torch.Tensor):
    """A tensor without numbers of its own."""

    held: Tensor

    @staticmethod
    def __new__(cls, like: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        made.held = like
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        held = [one.held if isinstance(one, Described) else one for one in args]
        found = func(*held, **(kwargs or {}))
        return args[0] if found is held[0] else Described(found)


def test_a_tensor_without_memory_is_drawn_by_torch() -> None:
    torch.manual_seed(3)
    wanted = torch.empty(8, 5).bernoulli_(0.3)[:4]
    torch.manual_seed(3)
    mask = Described(torch.empty(4, 5))
    with Draws(RowBlock(0, 2, 8), {("aten.bernoulli_.float", 2): 0}).entered(by_mode=False):
        mask.bernoulli_(0.3)
    assert torch.equal(mask.held, wanted)


def test_a_tensor_without_numbers_is_left_alone() -> None:
    mask = FakeTensorMode().from_tensor(torch.empty(4, 5))
    state = torch.get_rng_state()
    with Draws(RowBlock(0, 2, 8), {("aten.bernoulli_.float", 2): 0}).entered(by_mode=False):
        assert mask.bernoulli_(0.3) is mask
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("by_mode", [True, False])
def test_another_number_read_is_another_way(by_mode: bool) -> None:
    draws = Draws(BLOCK, {}, [[2.0]])
    with draws.entered(by_mode=by_mode):
        assert torch.full((), 2.0).item() == 2
        with pytest.raises(BranchMismatchError):
            torch.full((), 3.0).item()
    with pytest.raises(BranchMismatchError):  # also if the program's code has caught the exception
        draws.end()


def test_cudnns_recurrent_layers_are_not_split() -> None:
    """So a module that packs its input itself runs whole with cuDNN, whatever is in its rows."""
    function = torch.ops.aten._cudnn_rnn.default
    arguments: tuple[Any, ...] = (torch.ones(3, 4), [], 0, None, torch.ones(1), None, 2)
    assert draws_random_numbers(function, arguments, {})
    with pytest.raises(UnsupportedDrawError, match="draws numbers that depend on its input"):
        draw_shape(function, arguments, {})
