"""``lagom.forward.rows.skipped_draws``: numbers of other rows are skipped, as if they had been drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lagom.exchange.native import native
from lagom.forward.rows.skipped_draws import can_skip, draw_own_rows

needs_native = pytest.mark.skipif(native() is None, reason="without a compiler whole masks are drawn")
DRAW = torch.ops.aten.bernoulli_.float


@needs_native
@pytest.mark.parametrize("drawn", [0, 1, 300, 623, 624])
def test_a_part_is_that_of_a_whole_draw(drawn: int) -> None:
    if not can_skip():
        pytest.skip("torch draws masks by MKL on this machine")
    for before, count, probability in itertools.product(
        (0, 1, 161, 162, 311, 312, 313, 624, 50_001), (0, 1, 311, 312, 313, 2000), (0.0, 0.1, 0.9, 1.0)
    ):
        generators = [torch.Generator().manual_seed(5) for _ in range(2)]
        for generator in generators:
            torch.empty(drawn, dtype=torch.int32).random_(generator=generator)
        whole = torch.empty(before + count + 7).bernoulli_(probability, generator=generators[0])
        state, part = generators[1].get_state(), torch.empty(count, dtype=torch.bool)
        native().draw_mask(state.data_ptr(), len(state), probability, before, part.data_ptr(), count, 7)
        assert torch.equal(part.float(), whole[before : before + count])
        assert torch.equal(state, generators[0].get_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize(
    "rows_of",
    [
        lambda mask: mask,
        lambda mask: mask.to(memory_format=torch.channels_last),
        lambda mask: mask.permute(0, 2, 3, 1).contiguous().permute(0, 2, 3, 1),
        lambda mask: torch.cat([mask, mask], dim=3)[..., :3],
    ],
    ids=["contiguous", "channels last", "permuted", "part of a wider one"],
)
def test_own_rows_of_a_mask_are_those_of_the_whole(dtype: torch.dtype, rows_of: Callable[[Tensor], Tensor]) -> None:
    if not can_skip():
        pytest.skip("torch draws masks by MKL on this machine, or there is no compiler")
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    whole = rows_of(torch.empty(7, 5, 4, 3, dtype=dtype)).bernoulli_(0.3, generator=one)
    mask = rows_of(torch.empty(3, 5, 4, 3, dtype=dtype))
    assert draw_own_rows(DRAW, (mask, 0.3), {"generator": other}, axis=0, num_before=2, num_all=7)
    assert torch.equal(mask, whole[2:5])
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "rows_of",
    [
        lambda mask: mask,
        lambda mask: mask.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    ],
    ids=["contiguous", "after two"],
)
def test_rows_may_come_once_for_each_step(rows_of: Callable[[Tensor], Tensor], num_rows: int) -> None:
    if not can_skip():
        pytest.skip("torch draws masks by MKL on this machine, or there is no compiler")
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    whole = rows_of(torch.empty(6, 7, 2, 160)).bernoulli_(0.3, generator=one)
    mask = rows_of(torch.empty(6, num_rows, 2, 160))
    assert draw_own_rows(DRAW, (mask, 0.3), {"generator": other}, axis=1, num_before=2, num_all=7)
    assert torch.equal(mask, whole[:, 2 : 2 + num_rows])
    assert torch.equal(one.get_state(), other.get_state())


@needs_native
def test_the_trial_does_not_depend_on_the_programs_defaults() -> None:
    wanted = can_skip()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        can_skip.cache_clear()
        with torch.device("meta"):
            assert can_skip() == wanted
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((), {"p": 0.2}), ((0.2,), {})])
def test_the_probability_may_be_torchs_default(args: tuple[float, ...], kwargs: dict[str, float]) -> None:
    if not can_skip():
        pytest.skip("torch draws masks by MKL on this machine, or there is no compiler")
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    whole, mask = torch.empty(40, 3), torch.empty(20, 3)
    DRAW(whole, *args, **kwargs, generator=one)
    assert draw_own_rows(DRAW, (mask, *args), {**kwargs, "generator": other}, axis=0, num_before=20, num_all=40)
    assert torch.equal(mask, whole[20:])


def test_rows_that_do_not_lie_side_by_side_are_not_drawn_alone() -> None:
    mask = torch.zeros(5, 3)
    assert not draw_own_rows(DRAW, (mask, 0.3), {}, axis=1, num_before=0, num_all=6)
    assert not draw_own_rows(DRAW, (mask.t(), 0.3), {}, axis=0, num_before=0, num_all=6)
    assert not draw_own_rows(DRAW, (mask.view(5, 1, 3), 0.3), {}, axis=1, num_before=0, num_all=6)
    assert not mask.any()


def test_what_is_no_probability_is_left_to_torch() -> None:
    mask = torch.zeros(5, 3)
    assert not draw_own_rows(DRAW, (mask, 1.5), {}, axis=0, num_before=0, num_all=6)
    assert not draw_own_rows(DRAW, (mask, float("nan")), {}, axis=0, num_before=0, num_all=6)


@needs_native
@pytest.mark.parametrize(
    ("size", "probability", "text"), [(32, 0.5, "not the state of a generator"), (8192, 1.5, "not a probability")]
)
def test_wrong_arguments_are_errors(size: int, probability: float, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        native().draw_mask(torch.zeros(2048).data_ptr(), size, probability, 0, 0, 0, 0)
