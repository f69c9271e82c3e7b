"""Outputs of a model as named columns, and values of torch, numpy and pandas as Arrow arrays."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.extensions.scoring.input_columns import ScoringError

DEFAULT_NAME = "prediction"


def named_outputs(output: Any, names: Sequence[str] | None, num_rows: int) -> dict[str, Any]:
    """Return the outputs of a model by name: tensors on the CPU, or lists of texts, with a row for each of the inputs.

    A single output is called "prediction", those of a tuple "prediction_0" and so on, those of a dict or a dataclass
    as there. ``names`` renames them, and chooses from those of a dict.

    Raises:
        ScoringError: if an output has another number of rows, cannot be a column, or has no name in ``names``.
    """
    outputs = _by_name(output)
    if outputs is None:
        many = isinstance(output, (tuple, list)) and not _is_texts(output)
        values = [value for value in output if value is not None] if many else [output]
        given = names or ([f"{DEFAULT_NAME}_{n}" for n in range(len(values))] if many else [DEFAULT_NAME])
        if len(given) != len(values):
            raise ScoringError(
                f"outputs= has {_count(given, 'name')}, and the model returned {_count(values, 'output')}"
            )
        outputs = dict(zip(given, values, strict=True))
    elif names is not None:
        if missing := [name for name in names if name not in outputs]:
            raise ScoringError(f"the model returned no output {missing[0]!r}, but {', '.join(map(repr, outputs))}")
        outputs = {name: outputs[name] for name in names}
    if not outputs:
        raise ScoringError("the model returned nothing; want a tensor, or a tuple, dict or dataclass of tensors")
    return {name: _rows(name, value, num_rows) for name, value in outputs.items()}


def _by_name(output: Any) -> dict[str, Any] | None:
    """Return the parts of a dict, a dataclass or a named tuple, but for those that are None; None for other values."""
    if isinstance(output, Mapping):
        items = {str(name): value for name, value in output.items()}
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        items = dict(zip(output._fields, output, strict=True))
    else:
        return None
    return {name: value for name, value in items.items() if value is not None}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, (str, type(None))) for item in value)


def _count(values: Sequence[Any], noun: str) -> str:
    return f"{len(values)} {noun}{'s' * (len(values) != 1)}"


def _rows(name: str, value: Any, num_rows: int) -> Any:
    import torch

    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    is_texts = _is_texts(value)
    if not is_texts and not isinstance(value, torch.Tensor):
        raise ScoringError(
            f"the output {name!r} is a {type(value).__name__}; want a tensor with a row for each row of the inputs, or "
            "a list of texts: choose outputs by outputs=, or make them with postprocess="
        )
    shape = (len(value),) if is_texts else tuple(value.shape)
    if not shape or shape[0] != num_rows:
        raise ScoringError(
            f"the output {name!r} has the shape {shape} for {num_rows} rows; want {num_rows} as its first dimension: "
            "choose outputs by outputs=, or make them with postprocess="
        )
    if is_texts:
        return value
    value = value.detach().cpu()
    if value.is_complex() or value.layout != torch.strided or value.is_nested:
        raise ScoringError(
            f"the output {name!r} is a tensor of {value.dtype}, {value.layout}; want dense, real numbers"
        )
    value = value.squeeze(1) if value.dim() == 2 and value.shape[1] == 1 else value
    wider = {"float16": "float32", "bfloat16": "float32", "uint8": "int16", "uint16": "int32", "uint32": "int64"}
    kind = str(value.dtype).removeprefix("torch.")
    return value.to(getattr(torch, wider[kind])) if kind in wider else value


def arrow_array(value: Any) -> Any:
    """Return a column of ``named_outputs`` as an Arrow array."""
    import pyarrow as pa

    return pa.array(value, pa.string()) if isinstance(value, list) else nested(value.contiguous().numpy())


def nested(values: Any) -> Any:
    """Return a numpy array as an Arrow array of its rows: numbers, or lists of lists for further dimensions."""
    import numpy as np
    import pyarrow as pa

    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        num_lists = int(np.prod(values.shape[:axis]))
        offsets = np.arange(num_lists + 1, dtype=np.int64) * values.shape[axis]
        small = offsets[-1] < 2**31
        kind = pa.ListArray if small else pa.LargeListArray
        array = kind.from_arrays(pa.array(offsets, pa.int32() if small else pa.int64()), array)
    return array


def batch_of_pandas(frame: Any, names: Sequence[str]) -> Any:
    """Return columns of a DataFrame of pandas as a record batch of Arrow, with nulls for NaN.

    Raises:
        ScoringError: for a column that has values of several types, or arrays of several shapes.
    """
    import pyarrow as pa

    places = {str(name): place for place, name in enumerate(frame.columns)}
    arrays = [_array_of_pandas(frame.iloc[:, places[name]], name) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def _array_of_pandas(series: Any, name: str) -> Any:
    import numpy as np
    import pyarrow as pa

    is_object = series.dtype == object
    cell = next((cell for cell in series if cell is not None), None) if is_object else None
    try:
        if isinstance(cell, np.ndarray) and cell.ndim > 1:
            return nested(np.stack(list(series)))
        array = pa.array(series, from_pandas=True)
    except (ValueError, TypeError) as error:  # Arrow's errors are of these classes
        raise ScoringError(
            f"column {name!r} has values of several types, or arrays of several shapes: {error}"
        ) from error
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


_ARROW = {
    "boolean": "bool_",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
}
_SAME = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint", "bool": "boolean", "real": "float"}


def arrow_type(text: str) -> Any:
    """Return the Arrow type of a type in Spark's spelling, such as "float" or "array<double>".

    Raises:
        ValueError: for another type.
    """
    import pyarrow as pa

    text = text.strip().lower()
    if matched := re.fullmatch(r"array *< *(.+) *>", text):
        return pa.list_(arrow_type(matched[1]))
    text = _SAME.get(text, text)
    if text not in _ARROW:
        raise ValueError(f"outputs= has the type {text!r}; want one of {', '.join(_ARROW)}, or array<...> of these")
    return getattr(pa, _ARROW[text])()


def spark_type(kind: Any) -> str:
    """Return an Arrow type of outputs in Spark's spelling."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{spark_type(kind.value_type)}>"
    return next(name for name, other in _ARROW.items() if getattr(pa, other)() == kind)
