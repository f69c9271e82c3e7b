"""``Surroundings``: what a module's forward may read besides its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lagom.row_split.surroundings import Surroundings


class Compiled:
    """Like the class of Cython's functions, which has a descriptor for the names of their modules."""

    factor = 2.0


Compiled.__module__ = vars(slice)["start"]
ONE: Any = Compiled()
NUMBERS = [1.0]


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x * ONE.factor * NUMBERS[0]
        return found


def test_an_object_of_compiled_code_is_passed_over() -> None:
    around = Surroundings([Net()])
    before = around.state()
    NUMBERS[0] = 3.0
    assert around.state() != before
    assert Net()(torch.ones(1)).item() == 6.0
