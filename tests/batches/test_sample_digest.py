"""``lagom.batches.sample_digest``: the parts of a sample that are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lagom.batches.sample_digest import digest


class Opaque:
    def __init__(self, path: str) -> None:
        self.path = path


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(6), torch.arange(6) + 1),
        (torch.arange(6), torch.arange(6).view(2, 3)),
        (torch.linspace(0, 1, 5), torch.linspace(0.1, 1.1, 5)),
        (np.arange(6), np.arange(1, 7)),
        (np.float32(0.5), np.float32(0.6)),
        ((1, "a"), (1, "b")),
        ({"x": 1.5}, {"x": 1.6}),
        ([1, 2], [1, 2, 3]),
        (b"a", b"b"),
        (True, 1),
        (None, 0),
    ],
    ids=str,
)
def test_samples_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_what_another_machine_may_hold_otherwise_does_not_count() -> None:
    pixels = torch.rand(3, 64, 64) + 0.01
    assert digest(pixels) == digest(pixels * (1 + 1e-7))
    assert digest(Opaque("/here")) == digest(Opaque("/there"))
    assert digest({1, 2}) == digest({3})
    assert digest(np.array([object()])) == digest(np.array([object()]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whatever_a_sample_is_it_has_a_digest() -> None:
    sparse = torch.eye(3).to_sparse()
    for sample in (sparse, torch.empty(0), torch.tensor(2.0), torch.tensor([True]), 1j, torch.rand(2).bfloat16()):
        assert digest(sample) == digest(sample)
    assert digest(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), exact=True)
    assert digest(np.array(["text"])) == digest(np.array(["text"]))
    assert digest(torch.empty(2, device="meta"))
    assert digest(np.empty((0, 3)))
    assert digest(torch.tensor([1 + 2j]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))
