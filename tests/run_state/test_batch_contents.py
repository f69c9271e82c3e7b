"""``lagom.run_state.batch_contents``: the number of rows in batches of any structure."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch

from lagom.run_state.batch_contents import count_rows, count_samples


def test_rows_are_counted_wherever_texts_and_single_numbers_stand() -> None:
    x = torch.zeros(3, 2)
    for batch in (x, [x], ("text", x), {"name": ["a"] * 3, "x": x}, {"step": torch.tensor(1), "x": [x]}, x.numpy()):
        assert count_rows(batch) == 3
    assert count_rows(UserDict(name=["a"], x=x)) == 3
    without: list[Any] = ["text", ["a", "b"], [], {}, 4, torch.tensor(1), None]
    for empty in without:
        assert count_rows(empty) is None
        assert count_samples(empty) == 1
