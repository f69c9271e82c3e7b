"""``lagom.loaders.permutation``: an order of any number of samples, computed on the fly."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from lagom.loaders import permutation
from lagom.loaders.permutation import permute, permute_with_torch
from tests.ranks import run_ranks
from tests.session.loading import Numbers

KEYS = range(400)


@pytest.mark.soak  # the next test looks for numbers that are there twice
@given(n=st.integers(1, 3000), key=st.integers(-(2**63), 2**63 - 1))
def test_every_number_stands_there_once(n: int, key: int) -> None:
    assert sorted(permute(n, key, 0, n).tolist()) == list(range(n))


@given(n=st.integers(1, 2**62), key=st.integers(-(2**63), 2**63 - 1), part=st.floats(0, 1))
def test_both_ways_of_evaluating_give_the_same(n: int, key: int, part: float) -> None:
    start = min(int(n * part), n - 1)
    count = min(500, n - start)
    found = permute(n, key, start, count)
    assert found.tolist() == permute_with_torch(n, key, start, count).tolist()
    assert ((found >= 0) & (found < n)).all()
    assert len(found.unique()) == count


def test_blocks_are_parts_of_one_order() -> None:
    whole = permute(10_007, 5, 0, 10_007)
    parts = [permute(10_007, 5, start, min(1000, 10_007 - start)) for start in range(0, 10_007, 1000)]
    assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(ValueError, match="no places 9 to 11 in an order of 10"):
        permute(10, 5, 9, 2)


def test_the_order_itself_never_changes() -> None:
    assert permute(10**9, 12345, 777, 3).tolist() == FIRST


FIRST = [75635466, 782387540, 469284624]


@pytest.mark.parametrize("n", [100, 1000, pytest.param(9001, marks=pytest.mark.soak)])
def test_fixed_points_and_neighbours_are_as_many_as_by_chance(n: int) -> None:
    fixed = neighbours = 0
    for key in KEYS:
        order = permute(n, key, 0, n)
        fixed += int((order == torch.arange(n)).sum())
        neighbours += int((order.diff().abs() == 1).sum())
    # Both count rare events: mean and variance are 1 and 2 for each order. The limit is five deviations.
    assert abs(fixed - len(KEYS)) < 5 * len(KEYS) ** 0.5
    assert abs(neighbours - 2 * len(KEYS)) < 5 * (2 * len(KEYS)) ** 0.5


@pytest.mark.parametrize("n", [1000, 10**9 + 7])
def test_places_and_what_stands_there_have_nothing_to_do_with_each_other(n: int) -> None:
    """Chi-square test of 16 x 16 cells: places against values, and values against their successors."""
    for key in range(20):
        count = min(n, 200_000)
        order = permute(n, key, 0, count)
        values = order * 16 // n
        places = torch.arange(count) * 16 // count
        for first, second in ((places, values), (values[:-1], values[1:])):
            cells = torch.bincount(first * 16 + second, minlength=256).double()
            expected = len(first) / 256
            # At most 255 degrees of freedom, whose deviation is 22.6.
            assert ((cells - expected) ** 2 / expected).sum() < 255 + 6 * 22.6


@pytest.mark.soak  # test_the_order_itself_never_changes
def test_orders_of_different_keys_have_nothing_in_common() -> None:
    n = 4096
    first = [permute(n, key, 0, n) for key in range(100)]
    agreeing = sum(int((first[i] == first[j]).sum()) for i in range(100) for j in range(i))
    assert abs(agreeing - 4950) < 5 * 4950**0.5


def test_a_loader_over_a_billion_samples_begins_at_once_and_takes_no_memory() -> None:
    def run(session: Any) -> Any:
        session.evaluates_by_mode = lambda: False
        loader = DataLoader(Numbers(10**9), batch_size=64, shuffle=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = []
        start = time.process_time()
        for _ in range(2):
            iterator = iter(loader)
            found += [next(iterator).tolist() for _ in range(80)]
            del iterator
        took_s = time.process_time() - start
        return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, took_s

    (mine, grown, took_s), (theirs, *_) = run_ranks(2, run)
    seen = [index for batch in mine[:80] + theirs[:80] for index in batch]
    assert len(set(seen)) == len(seen) == 80 * 64
    assert mine[80:] != mine[:80]
    assert min(seen) < 10**7
    assert max(seen) > 10**9 - 10**7
    assert grown < 100_000  # KB
    assert took_s < 5  # torch's own order would take minutes


def test_with_fewer_samples_the_order_is_torchs_and_more_than_there_are_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def orders(session: Any) -> list[Any]:
        torch.manual_seed(3)
        own = list(RandomSampler(range(20)))
        monkeypatch.setattr(permutation, "MANY", 20)
        ours = list(RandomSampler(range(20), num_samples=50, generator=torch.Generator().manual_seed(1)))
        again = list(RandomSampler(range(20), num_samples=50, generator=torch.Generator().manual_seed(1)))
        few = list(RandomSampler(range(19), generator=torch.Generator().manual_seed(1)))
        return [own, ours, again, few]

    torch.manual_seed(3)
    wanted = list(RandomSampler(range(20)))
    few = list(RandomSampler(range(19), generator=torch.Generator().manual_seed(1)))
    for own, ours, again, smaller in run_ranks(2, orders):
        assert own == wanted
        assert ours == again
        assert smaller == few
        assert sorted(ours[:20]) == sorted(ours[20:40]) == list(range(20))
        assert ours[:20] != ours[20:40]
        assert len(set(ours[40:])) == 10
