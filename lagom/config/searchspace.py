"""``Searchspace``: names, types and ranges of the hyperparameters that a search varies."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lagom.settings import nearest

_RANGES = ("DOUBLE", "INTEGER")
_OTHER_NAMES = {
    **dict.fromkeys(("FLOAT", "REAL", "NUMBER", "UNIFORM", "LOGUNIFORM"), "DOUBLE"),
    **dict.fromkeys(("INT", "LONG", "RANDINT"), "INTEGER"),
    **dict.fromkeys(("CHOICE", "CHOICES", "ENUM", "STR", "STRING", "BOOL", "BOOLEAN"), "CATEGORICAL"),
}
"""Types by the names that other libraries have for them."""
_LISTS = ("DISCRETE", "CATEGORICAL")
TYPES = (*_RANGES, *_LISTS)
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """Name, type and possible values of one hyperparameter of a search."""

    name: str
    type: str
    """"DOUBLE", "INTEGER", "DISCRETE" or "CATEGORICAL"."""
    values: list[Any]
    """Lowest and highest value of a range, or all values of a list."""
    log: bool = False
    """Whether values of a range are drawn evenly by their logarithms."""

    @property
    def labels(self) -> list[Any]:
        """Return the label of each listed value in Optuna's study: the value itself, or a string for it.

        All labels are strings if a value is NaN or none of str, int, float, bool and None, or if two values are equal,
        such as 1 and True.
        """
        # NaN is not equal to itself, so ``value`` could not find it again if it were its own label.
        if all(type(one) in _PLAIN and one == one for one in self.values) and not _has_equals(self.values):
            return list(self.values)
        texts = [_text(value) for value in self.values]
        return [text if texts.count(text) == 1 else f"{text} #{place}" for place, text in enumerate(texts)]

    def value(self, label: Any) -> Any:
        """Return the value that ``label`` stands for."""
        if self.type in _RANGES:
            return label
        return self.values[next(i for i, one in enumerate(self.labels) if type(one) is type(label) and one == label)]

    def grid(self) -> list[Any]:
        """Return all values that a grid search tries, as labels.

        Raises:
            ValueError: for a "DOUBLE", which has too many.
        """
        if self.type == "DOUBLE":
            raise ValueError(
                f"a grid has no finite number of values for {self.name}, a DOUBLE; list the values to try, as in "
                f'{self.name}=("DISCRETE", {self.values})'
            )
        return list(range(self.values[0], self.values[1] + 1)) if self.type == "INTEGER" else self.labels

    def spec(self) -> tuple[Any, ...]:
        """Return the tuple that ``Searchspace`` takes."""
        return (self.type, self.values, "log") if self.log else (self.type, self.values)


class Searchspace:
    """The hyperparameters of a search, each as ``name=(type, values)``.

    ``Searchspace(lr=("DOUBLE", [1e-5, 1e-1], "log"), units=("INTEGER", [32, 512]), depth=("DISCRETE", [1, 2, 4]),
    act=("CATEGORICAL", ["relu", "tanh"]))``

    A DOUBLE or INTEGER is drawn from the range between two values, both included; with "log" evenly by its logarithm.
    A DISCRETE is one of the numbers in a list, a CATEGORICAL one of any objects that can be pickled.

    Raises:
        ValueError: when an entry cannot be searched; the text names it.
    """

    DOUBLE: ClassVar[str] = "DOUBLE"
    INTEGER: ClassVar[str] = "INTEGER"
    DISCRETE: ClassVar[str] = "DISCRETE"
    CATEGORICAL: ClassVar[str] = "CATEGORICAL"

    def __init__(self, **parameters: Sequence[Any]) -> None:
        self._parameters: dict[str, Parameter] = {}
        for name, spec in parameters.items():
            self.add(name, spec)

    def add(self, name: str, value: Sequence[Any]) -> None:
        """Add the hyperparameter ``name``, where ``value`` is ``(type, values)`` or ``(type, values, "log")``.

        Raises:
            ValueError: if the entry cannot be searched, or there is one with this name.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"searchspace has the name {name!r}; names are strings, such as 'lr'")
        if name in self._parameters:
            raise ValueError(f"searchspace has {name!r} twice")
        self._parameters[name] = _parameter(name, value)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All hyperparameters, in the order in which they were added."""
        return tuple(self._parameters.values())

    def to_dict(self) -> dict[str, tuple[Any, ...]]:
        """Return the entries by name, from which ``Searchspace(**entries)`` makes an equal one."""
        return {each.name: each.spec() for each in self.parameters}

    def names(self) -> dict[str, str]:
        """Return the type of each hyperparameter by name."""
        return {each.name: each.type for each in self.parameters}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the list of values of ``name``, or ``default`` if there is no such hyperparameter."""
        return self._parameters[name].values if name in self._parameters else default

    def keys(self) -> list[str]:
        """Return the names."""
        return list(self._parameters)

    def values(self) -> list[tuple[str, list[Any]]]:
        """Return type and values of each hyperparameter."""
        return [(each.type, each.values) for each in self.parameters]

    def items(self) -> Iterator[dict[str, Any]]:
        """Iterate over the hyperparameters as dicts ("name", "type", "values"), as over the searchspace itself."""
        return iter(self)

    def json(self) -> str:
        """Return the entries as JSON, with ``labels`` in place of listed values."""
        entries = {
            each.name: (each.type, each.values if each.type in _RANGES else each.labels, *each.spec()[2:])
            for each in self.parameters
        }
        return json.dumps(entries, sort_keys=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"name": each.name, "type": each.type, "values": each.values} for each in self.parameters])

    def __len__(self) -> int:
        return len(self._parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Searchspace) and self.parameters == other.parameters

    __hash__ = None  # type: ignore[assignment]  # entries can be added

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._parameters:
            raise AttributeError(f"Searchspace has no hyperparameter {name!r}")
        return self._parameters[name].values

    def __repr__(self) -> str:
        return f"Searchspace({', '.join(f'{each.name}={each.spec()!r}' for each in self.parameters)})"

    __str__ = json


def _parameter(name: str, spec: Any) -> Parameter:
    if not isinstance(spec, (tuple, list)) or len(spec) not in (2, 3) or not isinstance(spec[0], str):
        raise ValueError(f'searchspace has {name}={spec!r}; want (type, values), such as ("DOUBLE", [0.1, 1])')
    kind = spec[0].upper()
    if kind not in TYPES:
        other = _OTHER_NAMES.get(kind)
        hint = f"; did you mean {other!r}?" if other is not None else nearest(kind, TYPES)
        raise ValueError(f"{name} has the type {spec[0]!r}; types are {', '.join(TYPES)}{hint}")
    scale = spec[2] if len(spec) == 3 else "linear"
    if scale not in ("linear", "log"):
        raise ValueError(f'{name} has the scale {scale!r}; want "log", or nothing')
    values = _listed(name, kind, spec[1])
    if kind in _LISTS:
        if scale == "log":
            raise ValueError(f'{name} is of type {kind}, whose values are listed; "log" is for DOUBLE and INTEGER')
        values = [_discrete(name, value) for value in values] if kind == "DISCRETE" else values
        _check_twice(name, values)
    else:
        values = _bounds(name, kind, values)
        if scale == "log" and values[0] <= 0:
            raise ValueError(f"{name} begins at {values[0]}; a logarithmic range begins above 0")
    return Parameter(name=name, type=kind, values=values, log=scale == "log")


def _listed(name: str, kind: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} is of type {kind} with the values {values!r}; want a list")
    found = list(values)
    if not found:
        raise ValueError(f"{name} is of type {kind} without values; want at least one in the list")
    return found


def _bounds(name: str, kind: str, values: list[Any]) -> list[Any]:
    if len(values) != 2:
        raise ValueError(
            f"{name} is of type {kind} with {len(values)} values; want the lowest and the highest, or for values to "
            f'choose from ("DISCRETE", {values!r})'
        )
    ends = [_number(name, kind, value) for value in values]
    if ends[0] >= ends[1]:
        raise ValueError(
            f"{name} goes from {ends[0]} to {ends[1]}; the first must be less than the second, and a value that is "
            "not searched belongs into hparams"
        )
    return ends


def _number(name: str, kind: str, value: Any) -> Any:
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        found = operator.index(value) if kind == "INTEGER" else float(value)
    except (TypeError, ValueError):
        wanted = "an int" if kind == "INTEGER" else "a number"
        raise ValueError(f"{name} is of type {kind} with the bound {value!r}; want {wanted}") from None
    if not math.isfinite(found):
        raise ValueError(f"{name} is of type {kind} with the bound {value!r}; want a finite number")
    return found


def _discrete(name: str, value: Any) -> int | float:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, (bool, str)) and math.isfinite(value):
            return operator.index(value) if hasattr(value, "__index__") else float(value)
    raise ValueError(f'{name} is of type DISCRETE with the value {value!r}; want numbers, or the type "CATEGORICAL"')


def _check_twice(name: str, values: list[Any]) -> None:
    for first, second in itertools.combinations(values, 2):
        if first is second or (type(first) is type(second) and type(first) in _PLAIN and first == second):
            raise ValueError(f"{name} has the value {first!r} twice")


def _has_equals(values: list[Any]) -> bool:
    """Return whether two plain values are equal though their types differ, such as 1 and True."""
    return len(set(values)) < len(values)


def _text(value: Any) -> str:
    named = getattr(value, "__qualname__", None)
    if isinstance(named, str):
        return named.rpartition("<locals>.")[2]
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 and " at 0x" not in text else type(value).__name__
