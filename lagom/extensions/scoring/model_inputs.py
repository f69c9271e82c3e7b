"""``model_inputs``: which columns become which arguments of a model, checked against the table and the model."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lagom.extensions.data.column_types import types
from lagom.extensions.scoring.row_scorer import Arguments, Columns

Inputs = str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None
_MANY = 12


def model_inputs(
    inputs: Inputs, transform: Callable[..., Any] | None, forward: Callable[..., Any], names: Sequence[str]
) -> tuple[tuple[str, ...], Arguments | None]:
    """Return the columns that are read, and those of each argument; None for these with a ``transform``.

    Args:
        names: names of the table's columns.

    Raises:
        ValueError: if a column does not exist, or the columns are not what ``forward`` takes.
    """
    if transform is not None:
        if isinstance(inputs, Mapping) or any(not isinstance(one, str) for one in inputs or ()):
            raise ValueError("with transform=, inputs= is a list of names: the columns that transform may read")
        read = (inputs,) if isinstance(inputs, str) else tuple(map(str, inputs or names))
        _check_names(read, names)
        return read, None
    parameters = forward_parameters(forward)
    arguments = _by_parameters(parameters, names) if inputs is None else _given(inputs, parameters)
    columns = [name for one in (*arguments.positional, *(one for _, one in arguments.named)) for name in _listed(one)]
    _check_names(columns, names)
    try:
        if parameters is not None:
            inspect.signature(forward).bind(*arguments.positional, **dict(arguments.named))
    except TypeError as error:
        raise ValueError(
            f"inputs= does not fit the model, whose forward{inspect.signature(forward)}: {error}"
        ) from None
    return tuple(dict.fromkeys(columns)), arguments


def check_types(columns: Sequence[str], arguments: Arguments | None, schema: Any) -> None:
    """Check that the columns of an Arrow ``schema`` can be tensors, if they are the model's arguments themselves.

    Raises:
        ValueError: for a column of texts, or of another type that cannot be a tensor.
    """
    if arguments is None:
        return
    for name in columns:
        kind = types.plain(schema.field(name).type)
        if types.is_text(kind):
            raise ValueError(
                f"column {name!r} has {kind}, and a model takes numbers: have Spark's StringIndexer or "
                "pandas.factorize number the values as for the training, or give transform="
            )
        if not types.can_be_tensor(kind) and not types.is_vector(kind):
            raise ValueError(f"column {name!r} has the type {kind}, which cannot be a tensor; give transform=")


def _listed(one: Columns) -> tuple[str, ...]:
    return (one,) if isinstance(one, str) else one


def _check_names(columns: Sequence[str], names: Sequence[str]) -> None:
    if not columns:
        raise ValueError("inputs= names no column")
    counts = Counter(names)
    for name in columns:
        if counts[name] > 1:
            raise ValueError(f"there are {counts[name]} columns {name!r}; rename them")
        if not counts[name]:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {_some(names)}"
            raise ValueError(f"there is no column {name!r}; {hint}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(map(repr, names[:_MANY])) + more


def forward_parameters(forward: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of ``forward`` with a name; None if it cannot be inspected."""
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return None
    return [each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _by_parameters(parameters: list[inspect.Parameter] | None, names: Sequence[str]) -> Arguments:
    """Return the columns that are called as the parameters are."""
    how = 'name the columns, inputs=["a", "b"], or those that are put side by side in one tensor, inputs=[["a", "b"]]'
    if not parameters:
        raise ValueError(f"the names of the arguments of the model's forward are not known: {how}")
    missing = [each.name for each in parameters if each.default is each.empty and each.name not in names]
    if missing:
        raise ValueError(
            f"the model's forward takes {', '.join(each.name for each in parameters)}, and there is no column "
            f"{missing[0]!r} among {_some(names)}: {how}"
        )
    return Arguments(named=tuple((each.name, each.name) for each in parameters if each.name in names))


def _given(inputs: Any, parameters: list[inspect.Parameter] | None) -> Arguments:
    if isinstance(inputs, Mapping):
        return Arguments(named=tuple((name, _checked(one)) for name, one in inputs.items()))
    given = tuple(_checked(one) for one in ([inputs] if isinstance(inputs, str) else inputs))
    most = None if parameters is None else sum(each.kind != each.KEYWORD_ONLY for each in parameters)
    if most and len(given) > most and all(isinstance(one, str) for one in given):
        return Arguments(positional=(given,))  # type: ignore[arg-type]
    return Arguments(positional=given)


def _checked(one: Any) -> Columns:
    if isinstance(one, str):
        return one
    names = tuple(one) if isinstance(one, (list, tuple)) else ()
    if not names or any(not isinstance(name, str) for name in names):
        raise ValueError(f"inputs= has {one!r}; want the name of a column, or a list of names")
    return names
