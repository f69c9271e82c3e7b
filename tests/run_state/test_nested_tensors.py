"""``lagom.run_state.batch_contents``: what counts as a container of tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lagom.run_state.batch_contents import tensors

Pair = namedtuple("Pair", "left right")  # as programs have them


@pytest.mark.parametrize(
    "around", [list, tuple, lambda parts: Pair(*parts), lambda parts: OrderedDict(enumerate(parts)),
               lambda parts: UserDict(enumerate(parts)), lambda parts: {"a": [parts]}],
)  # fmt: skip
def test_tensors_of_any_list_tuple_or_mapping_are_found_in_order(around: Any) -> None:
    first, second = torch.ones(2), torch.nn.Parameter(torch.zeros(3))
    assert [id(one) for one in tensors(around([first, ("text", around([None, second]))]))] == [id(first), id(second)]


def test_other_objects_are_not_looked_into() -> None:
    assert tensors([SimpleNamespace(x=torch.ones(1)), "text", 3, {torch.ones(1)}, torch.ones(1).numpy()]) == []
