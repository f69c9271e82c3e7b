"""``unreadable``: recognises paths and DataFrames from which a torch ``DataLoader`` cannot take samples."""

from __future__ import annotations

import ast
import inspect
import os
import reprlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAX_PATH = 4096  # characters
_FRAME = (
    "{} DataFrame, whose rows are no samples; want a TensorDataset of its columns, or save it as Parquet ({}) and give "
    "lagom.data.ParquetDataset(path)"
)


def check_data(train: Callable[..., Any], provided: Mapping[str, Any]) -> None:
    """Check, before anything starts, the data sets that ``train`` certainly passes to a ``DataLoader`` unchanged.

    Raises:
        ValueError: if a loader could not take samples from a data set, or a data set is a DataFrame of pyspark.pandas.
    """
    for name in ("train_set", "test_set"):
        data = provided.get(name)
        if _is_frame(data, "pyspark.pandas."):
            raise ValueError(f"{name} is a DataFrame of pyspark.pandas; want one of Spark's own, frame.to_spark()")
        if _is_frame(data, "pyspark.sql.") or unreadable(data, {}) is None:
            continue  # ranks get a ParquetDataset in place of a Spark DataFrame
        for options in _loaders_of(train, name):
            if (text := unreadable(data, options)) is not None:
                raise ValueError(f"the function gives {name} to a DataLoader as it is, and it is {text}")


def unreadable(data: object, options: Mapping[str, Any]) -> str | None:
    """Return a text about ``data`` and the remedy; None if a loader may take samples from ``data``.

    Args:
        options: arguments of the loader by name; instead of values their code may be given, as by ``_options``.
    """
    if _is_path(data):
        return (
            f"the path {reprlib.repr(data)}, which is no data set; want lagom.data.ParquetDataset(path) for Parquet, "
            "torchvision.datasets.ImageFolder(path) for a folder of images"
        )
    if _is_frame(data, "pandas."):
        # A loader indexes the frame, and so gets columns. This is right if a sampler draws the names of columns, or if
        # columns are called 0, 1, ...
        chooses = any(options.get(name) is not None for name in ("sampler", "batch_sampler"))
        return None if chooses or 0 in data.columns else _FRAME.format("a pandas", "frame.to_parquet")  # type: ignore[attr-defined]
    if _is_frame(data, "polars."):
        # A sample is a DataFrame of one row, which the program may turn into a tensor itself.
        is_made = options.get("collate_fn") is not None or options.get("batch_size", 1) is None
        return None if is_made else _FRAME.format("a polars", "frame.write_parquet")
    if _is_frame(data, "pyspark."):
        return "a Spark DataFrame, which ranks read only as train_set= or test_set= of the config; give it there"
    return None


def _is_frame(data: object, module: str) -> bool:
    """Return whether ``data`` is a DataFrame of ``module``, and not of a subclass, whose items may be samples."""
    return type(data).__name__ == "DataFrame" and f"{type(data).__module__}.".startswith(module)


def _is_path(data: object) -> bool:
    """Return whether ``data`` is a path or a URL, and not a text whose letters are the samples."""
    if not isinstance(data, str):
        return isinstance(data, os.PathLike) and not hasattr(data, "__getitem__")
    if not data or len(data) > _MAX_PATH:
        return False
    return os.path.exists(data) or ("/" in data and len(data.split()) == 1)


def _loaders_of(train: Callable[..., Any], name: str) -> list[dict[str, Any]]:
    """Return the arguments of each ``DataLoader(name, ...)`` that ``train`` certainly makes, as syntax trees by name.

    Return an empty list if ``train`` uses the variable ``name`` for anything but loaders and ``len``, or where the use
    may be skipped (a condition, a ``while`` or ``try`` statement, an inner function). Also if ``train`` is decorated,
    is no ``def``, or has no readable source. Loaders after a conditional ``return``, or after a ``raise``, are left
    out.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(train))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return []
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return []
    certain = list(_certain(tree))
    calls = [node for node in certain if isinstance(node, ast.Call)]
    loaders = [call for call in calls if name in _data_of(call) and _is_loader(call.func, train)]
    lengths = [call for call in calls if name in _data_of(call) and ast.unparse(call.func) == "len"]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    if len(uses) != len(loaders) + len(lengths):
        return []
    ends = [node.lineno for node in ast.walk(tree) if isinstance(node, (ast.Return, ast.Raise)) and node not in certain]
    return [_options(call) for call in loaders if call.lineno < min(ends, default=call.lineno + 1)]


_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.For, ast.Return, ast.With)
_CONDITIONS = (ast.IfExp, ast.BoolOp, ast.Lambda)


def _certain(parent: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``parent`` that run whenever it runs: not those in conditions and inner functions.

    The body of a ``for`` loop counts as certain.
    """
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _STATEMENTS) or not isinstance(node, (ast.stmt, *_CONDITIONS)):
            yield node
            yield from _certain(node)


def _data_of(call: ast.Call) -> list[str]:
    """Return, in a list, the variable that is the first argument of ``call`` or ``dataset=``; [] if there is none."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return []
    given = [*call.args[:1], *(each.value for each in call.keywords if each.arg == "dataset")]
    return [each.id for each in given if isinstance(each, ast.Name)]


def _is_loader(called: ast.expr, train: Callable[..., Any]) -> bool:
    """Return whether ``called``, in the code of ``train``, is torch's own ``DataLoader``."""
    first, *rest = ast.unparse(called).split(".")
    value = getattr(train, "__globals__", {}).get(first)
    for name in rest:
        value = getattr(value, name, None)
    kind = (getattr(value, "__module__", ""), getattr(value, "__name__", ""))
    return kind == ("torch.utils.data.dataloader", "DataLoader")


def _options(call: ast.Call) -> dict[str, Any]:
    """Return the arguments of a loader by name, as syntax trees; None for an argument that is None."""
    names = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler")
    given = [*zip(names, call.args, strict=False), *((str(each.arg), each.value) for each in call.keywords)]
    return {name: None if ast.unparse(code) == "None" else code for name, code in given}
