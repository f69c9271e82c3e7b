"""``lagom.row_split.skipped_draws``: numbers of other rows are skipped, as if they had been drawn."""

from __future__ import annotations

import pytest
import torch

from lagom.collectives.native import native
from lagom.row_split.skipped_draws import can_skip, draw_own_rows

needs_native = pytest.mark.skipif(native() is None, reason="without a compiler whole masks are drawn")
DRAW = torch.ops.aten.bernoulli_.float


@needs_native
@pytest.mark.parametrize("drawn", [0, 1, 300, 623, 624])
@pytest.mark.parametrize("count", [0, 1, 323, 324, 325, 623, 624, 625, 1247, 1248, 1249, 100_003])
def test_skipped_numbers_are_those_that_torch_draws(drawn: int, count: int) -> None:
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    for generator in generators:
        torch.empty(drawn, dtype=torch.int32).random_(generator=generator)
    torch.empty(count, dtype=torch.int32).random_(generator=generators[0])
    state = generators[1].get_state()
    native().skip_random_numbers(state.data_ptr(), len(state), count)
    assert torch.equal(state, generators[0].get_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_own_rows_of_a_mask_are_those_of_the_whole(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    if not can_skip(dtype):
        pytest.skip("torch draws masks by MKL on this machine, or there is no compiler")
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    whole = torch.empty(7, 5, 4, 3, dtype=dtype).to(memory_format=memory_format).bernoulli_(0.3, generator=one)
    mask = torch.empty(3, 5, 4, 3, dtype=dtype).to(memory_format=memory_format)
    assert draw_own_rows(DRAW, (mask, 0.3), {"generator": other}, axis=0, num_before=2, num_all=7)
    assert torch.equal(mask, whole[2:5])
    assert torch.equal(one.get_state(), other.get_state())


def test_rows_that_do_not_lie_side_by_side_are_not_drawn_alone() -> None:
    mask = torch.zeros(5, 3)
    assert not draw_own_rows(DRAW, (mask, 0.3), {}, axis=1, num_before=0, num_all=6)
    assert not draw_own_rows(DRAW, (mask.t(), 0.3), {}, axis=0, num_before=0, num_all=6)
    assert not draw_own_rows(DRAW, (mask.view(5, 1, 3), 0.3), {}, axis=1, num_before=0, num_all=6)
    assert not mask.any()


@needs_native
def test_what_is_no_state_of_a_generator_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not the state of a generator"):
        native().skip_random_numbers(torch.zeros(8).data_ptr(), 32, 1)
