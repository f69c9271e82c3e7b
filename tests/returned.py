"""Values of every type that a program may return, each made from a number: equal for equal numbers alone."""

from __future__ import annotations

import dataclasses
import datetime
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch


class Score(NamedTuple):
    name: str
    value: float


@dataclasses.dataclass
class Report:
    name: str
    value: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    curve: list[float]


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Raises(Plain):
    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class GivesArray(Plain):
    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


class Unlike(Plain):
    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")

    __hash__ = None  # type: ignore[assignment]


def _frame(x: float) -> pd.DataFrame:
    return pd.DataFrame({"epoch": [1, 2], "accuracy": [x, float("nan")], "name": ["a", None]})


def _doubled(x: float) -> pd.DataFrame:
    return pd.DataFrame([[1.0, 2.0], [3.0, x]], columns=["loss", "loss"], index=["a", "b"])


def _network(x: float) -> torch.nn.Module:
    network = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(network.weight, x)
    torch.nn.init.zeros_(network.bias)
    return network


def _optimizer(x: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(_network(0.0).parameters(), lr=x)


def _nested(x: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that nested tensors may change
        return torch.nested.nested_tensor([torch.ones(2), torch.tensor([x])])


AVERAGED: dict[str, Callable[[float], Any]] = {
    "float": lambda x: x,
    "numpy float64": np.float64,
    "numpy float32": np.float32,
    "list": lambda x: [0.5, x],
    "tuple": lambda x: (1, x, "text"),
    "namedtuple": lambda x: Score("accuracy", x),
    "dict": lambda x: {"loss": x, "epochs": 3, "ok": True},
    "dict in a dict": lambda x: {"train": {"loss": [x, 0.5]}, "name": None},
    "OrderedDict of floats": lambda x: OrderedDict(b=x, a=0.25),
    "defaultdict": lambda x: defaultdict(list, {"loss": [0.5, x]}),
    "dataclass": lambda x: Report("accuracy", x),
    "frozen dataclass": lambda x: Frozen([x, float("nan")]),
    "metrics beside a tensor": lambda x: {"loss": x, "weights": torch.ones(2)},
}
"""Values whose floats are averaged where ranks disagree."""

KEPT: dict[str, Callable[[float], Any]] = {
    "int": int,
    "bool": lambda x: x > 1.5,
    "str": str,
    "bytes": lambda x: str(x).encode(),
    "None or not": lambda x: None if x > 1.5 else 0.0,
    "complex": lambda x: complex(x, 1),
    "Fraction": Fraction,
    "Decimal": Decimal,
    "date": lambda x: datetime.date(2026, 1, int(x)),
    "ints in a list": lambda x: [1, [int(x)]],
    "keys of a dict": lambda x: {f"epoch {int(x)}": 1.0},
    "length of a list": lambda x: [0.5] * int(x),
    "set": lambda x: {"a", "b", x},
    "frozenset": lambda x: frozenset(("a", x)),
    "deque": lambda x: deque([x]),
    "Counter": lambda x: Counter(a=int(x)),
    "SimpleNamespace": lambda x: SimpleNamespace(loss=x),
    "tensor of no dimension": torch.tensor,
    "tensor": lambda x: torch.tensor([[x, float("nan")]]),
    "tensor of ints": lambda x: torch.tensor([int(x), 1000]),
    "tensor of bools": lambda x: torch.tensor([x > 1.5]),
    "sparse tensor": lambda x: torch.tensor([[0.0, x]]).to_sparse(),
    "nested tensor": _nested,
    "complex tensor": lambda x: torch.tensor([complex(x, 1.0)]),
    "half precision": lambda x: torch.tensor([x, float("nan")], dtype=torch.bfloat16),
    "parameter": lambda x: torch.nn.Parameter(torch.tensor([x])),
    "shape of a tensor": lambda x: torch.zeros(int(x)),
    "dtype of a tensor": lambda x: torch.zeros(1, dtype=torch.float32 if x > 1.5 else torch.float64),
    "ndarray": lambda x: np.array([x, np.nan]),
    "ndarray of ints": lambda x: np.array([int(x)]),
    "ndarray of texts": lambda x: np.array([str(x)]),
    "ndarray of objects": lambda x: np.array([None, x], dtype=object),
    "ndarray of dates": lambda x: np.array([f"2026-01-0{int(x)}", "NaT"], dtype="datetime64[D]"),
    "shape of an ndarray": lambda x: np.zeros((int(x), 1)),
    "dtype of an ndarray": lambda x: np.zeros(1, dtype="f4" if x > 1.5 else "f8"),
    "numpy int": lambda x: np.int64(x),
    "numpy bool": lambda x: np.bool_(x > 1.5),
    "DataFrame": _frame,
    "DataFrame with two columns of one name": _doubled,
    "columns of a DataFrame": lambda x: pd.DataFrame({f"c{int(x)}": [1.0]}),
    "DataFrame in a dict": lambda x: {"history": _frame(x)},
    "Series": lambda x: pd.Series([x, None], name="loss"),
    "name of a Series": lambda x: pd.Series([1.0], name=str(x)),
    "categories": lambda x: pd.Series([f"a{int(x)}", "b"], dtype="category"),
    "Index": lambda x: pd.Index([x, 5.0]),
    "state_dict": lambda x: _network(x).state_dict(),
    "state_dict with a count": lambda x: OrderedDict(weight=torch.ones(1), count=torch.tensor(int(x) + 500)),
    "checkpoint in a result": lambda x: {"best": {"model": _network(1.0).state_dict(), "loss": x}},
    "module": _network,
    "optimizer": _optimizer,
    "object": Plain,
    "object with slots": Slotted,
    "object whose equality raises": Raises,
    "object whose equality gives an array": GivesArray,
    "object that equals nothing": Unlike,
    "array in an object": lambda x: Plain([np.array([x])]),
    "class": lambda x: Plain if x > 1.5 else Slotted,
    "types": lambda x: [1.0] if x > 1.5 else (1.0,),
}
"""Functions of which only rank 0's result is returned."""
