"""``lagom.extensions.zero.partition``: every element is in one piece, and ranks have about as much of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from lagom.extensions.zero.partition import ParameterPiece, partition_by_element, partition_by_parameter


def test_every_element_is_in_one_piece() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.choice([1, 5, 64, 127, 128, 500, 4000, 70000]) for _ in range(draw.randint(1, 9))]
        for world_size in (1, 2, 3, 8):
            for deal in (partition_by_element, partition_by_parameter):
                parts = deal(sizes, world_size)
                assert len(parts) == world_size
                pieces = sorted(piece for part in parts for piece in part)
                for number, size in enumerate(sizes):
                    places = [(piece.start, piece.end) for piece in pieces if piece.param == number]
                    assert places[0][0] == 0
                    assert places[-1][1] == size
                    assert all(a[1] == b[0] for a, b in pairwise(places))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_have_about_as_many_elements(world_size: int) -> None:
    sizes = [4096, 64, 250_000, 64, 777, 90_000, 10, 33]
    counts = [sum(piece.end - piece.start for piece in part) for part in partition_by_element(sizes, world_size)]
    assert max(counts) - min(counts) <= 2 * 64 + 2 * 16


def test_small_parameters_stay_whole() -> None:
    assert partition_by_element([100, 100], 3) == [[ParameterPiece(0, 0, 100)], [], [ParameterPiece(1, 0, 100)]]
    assert partition_by_element([127], 2) in ([[ParameterPiece(0, 0, 127)], []], [[], [ParameterPiece(0, 0, 127)]])


def test_the_largest_parameters_go_to_different_ranks() -> None:
    parts = partition_by_parameter([10, 100, 20, 90, 30], 2)
    assert [sum(piece.end for piece in part) for part in parts] == [130, 120]
