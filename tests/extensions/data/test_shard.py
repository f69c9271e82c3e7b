"""``lagom.extensions.data.parquet.shard``: each row once, in an order that does not depend on who reads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lagom.extensions.data.parquet.shard import Epoch, EpochOrder, Positions

LAYOUTS = st.lists(st.integers(0, 9), max_size=12).map(tuple)
ORDERS = st.builds(
    EpochOrder,
    counts=LAYOUTS,
    seed=st.none() | st.integers(0, 2**63),
    streams=st.integers(1, 9),
    window=st.integers(1, 11),
)
EPOCH = Epoch(0, 0, 0, 0, 1, 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ORDERS)
def test_every_row_has_one_position(order: EpochOrder) -> None:
    rows = [order.row(position) for position in range(order.num_rows)]
    assert sorted(rows) == [(group, row) for group, count in enumerate(order.counts) for row in range(count)]
    assert sum(order.length(stream) for stream in range(order.streams)) == order.num_rows


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ORDERS)
def test_windows_read_each_row_of_a_stream_once_and_groups_in_one_go(order: EpochOrder) -> None:
    for stream in range(order.streams):
        length = order.length(stream)
        bounds = [*range(0, length, order.window), length]
        read = [piece for start, stop in pairwise(bounds) for piece in order.pieces(stream, start, stop)]
        whole = order.pieces(stream, 0, length)
        assert [(p.group, row) for p in read for row in range(p.start, p.stop)] == [
            (p.group, row) for p in whole for row in range(p.start, p.stop)
        ]
        assert len({p.group for p in whole}) == len(whole)
        assert all(p.start < p.stop <= order.counts[p.group] for p in read)
        for number in range(-(-length // order.window)):
            assert sorted(order.shuffled(stream, number)) == list(range(order.window_rows(stream, number)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 60), st.integers(1, 17), st.integers(1, 9))
def test_shares_of_a_batch_are_even_and_keep_to_their_streams(start: int, size: int, world_size: int) -> None:
    batch = Positions(EPOCH, range(start, start + size))
    shares = [batch.deal(rank, world_size) for rank in range(world_size)]
    assert sorted(place for share in shares for place in share) == list(batch)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(place % world_size == rank for rank, share in enumerate(shares) for place in share)
    assert {share.end for share in shares} == {start + size}


def test_the_order_differs_between_epochs_and_is_that_of_the_table_without_a_seed() -> None:
    orders = [EpochOrder((50, 50, 7), seed, 4, 16) for seed in (1, 2)]
    first, second = ([order.row(position) for position in range(107)] for order in orders)
    assert first != second
    plain = EpochOrder((3, 0, 2), None, 1, 2)
    assert [plain.row(position) for position in range(5)] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]


def test_the_shuffle_mixes_as_its_window_says() -> None:
    """The spread of batch means of row numbers, of which a perfect shuffle has 0.29 / sqrt(64) = 0.036."""
    counts = (1000,) * 64
    spreads = []
    for seed in range(3):
        order = EpochOrder(counts, seed, 8, 2000)
        starts = np.concatenate([[0], np.cumsum(counts)])
        inside = [
            starts[piece.group] + np.arange(piece.start, piece.stop)
            for s in range(8)
            for piece in order.pieces(s, 0, 8000)
        ]
        streams = np.concatenate(inside).reshape(8, -1)
        for stream in range(8):
            for number in range(4):
                part = slice(number * 2000, (number + 1) * 2000)
                streams[stream, part] = streams[stream, part][order.shuffled(stream, number)]
        batches = streams.T.reshape(-1, 64) / sum(counts)
        spreads.append(batches.mean(1).std())
        assert np.corrcoef(streams.T.ravel()[:-1], streams.T.ravel()[1:])[0, 1] < 0.05
    assert np.mean(spreads) < 0.1
