"""Plain values: what ranks tell each other comes out as it was, and runs nothing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from lagom.exchange.plain_values import all_gather_values, decode_value, encode_value


class _Alone:
    """A group of one rank."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        0.1,
        float("inf"),
        "ä\0",
        b"\0\xff",
        complex(1, -2),
        [1, [2]],
        (1, ("a", None)),
        {1, 2},
        frozenset({"a"}),
        {(0, "layer.weight"): ("float32", 3), 1: {}, "dict": [], "tensor": "text"},
        torch.bfloat16,
        torch.device("cuda:1"),
        [],
        (),
        {},
    ],
)
def test_a_plain_value_comes_out_as_it_was(value: Any) -> None:
    found = all_gather_values(_Alone(), value)[0]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(5),
        torch.empty(0, 3, dtype=torch.float64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.randn(4).bfloat16(),
        torch.randn(3, requires_grad=True),
    ],
)
def test_a_tensor_comes_out_bit_by_bit(tensor: torch.Tensor) -> None:
    found = decode_value(encode_value({"exp_avg": tensor}))["exp_avg"]
    assert found.dtype == tensor.dtype
    assert not found.requires_grad
    assert torch.equal(found, tensor.detach().resolve_conj())


@pytest.mark.parametrize("rows", [[], [4, 1]])
def test_a_sparse_tensor_comes_out_sparse(rows: list[int]) -> None:
    values = torch.arange(3.0 * len(rows)).view(len(rows), 3)
    given = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.long), values, (5, 3), check_invariants=True)
    found = decode_value(encode_value(given))
    assert found.is_sparse
    assert torch.equal(found.to_dense(), given.to_dense())


def test_arrays_and_numbers_of_numpy_come_out_equal() -> None:
    array, number, nothing = decode_value(encode_value((np.arange(6).reshape(2, 3).T, np.float32(0.5), np.zeros(0))))
    assert np.array_equal(array, np.arange(6).reshape(2, 3).T)
    assert number == 0.5
    assert nothing.shape == (0,)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot tell each other a torch.Tensor"):
        encode_value(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_another_object_is_refused_by_name_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match=r"cannot tell each other a .*_Alone"):
        encode_value({"state": [_Alone()]})


class _Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemError('ran')",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Runs()),
        encode_value(b"1234")[:-1],
        encode_value(torch.ones(3))[:-1],
        encode_value(torch.float32).replace(b"float32", b"manager"),
        encode_value({1: 2}).replace(b"dict", b"exec"),
    ],
)
def test_what_a_stranger_makes_up_is_an_error_and_is_not_run(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # also those of json, and of a cut text
        decode_value(data)
