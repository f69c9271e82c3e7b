"""``Surroundings``: what a module's forward may read besides its input."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lagom.forward.rows.surroundings import Surroundings


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


class Counting(nn.Module):
    def forward(self, x: Tensor, calls: list[int] = [0], *, seen: dict[str, int] = {}) -> Tensor:  # noqa: B006
        calls[0] += 1
        seen["batch"] = len(x)
        return x


def test_default_values_of_arguments_are_seen() -> None:
    around = Surroundings([Counting()])
    before = around.state()
    Counting()(torch.ones(1), seen={})
    assert around.state() != before
    before = around.state()
    Counting()(torch.ones(1), [0])
    assert around.state() != before


def test_an_object_of_compiled_code_is_passed_over() -> None:
    around = Surroundings([Net()])
    before = around.state()
    NUMBERS[0] = 3.0
    assert around.state() != before
    assert Net()(torch.ones(1)).item() == 6.0


def double(x: Tensor) -> Tensor:
    return 2 * x


def centre(x: Tensor) -> Tensor:
    return x - x.mean(0)


CHANGE = double


class Changing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return CHANGE(x)


def test_another_function_under_the_same_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings([Changing()])
    before = around.flags()
    assert around.flags() == before
    monkeypatch.setattr(sys.modules[__name__], "CHANGE", centre)
    assert around.flags() != before
