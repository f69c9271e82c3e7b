"""``as_json``, ``loaded`` and ``text_of``: convert values for the records of a run, and read them from the records."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from lagom.digests import parse_record
from lagom.errors import LagomError
from lagom.run_folder import RunFolder
from lagom.watch.secrets import HIDDEN, hide_in_text, hide_in_urls, is_secret

_MAX_TEXT = 20_000  # characters
_MAX_ITEMS = 200  # items of a list or a dict
_MAX_ELEMENTS = 16  # elements of an array that are written


def loaded(folder: RunFolder, name: str) -> dict[str, Any]:
    """Return the record in the file ``name`` of a run; empty if there is no such file.

    Raises:
        LagomError: if the file cannot be read, or is damaged.
    """
    try:
        return parse_record(folder.read(name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LagomError(f"{folder.path / name} is damaged: {_one_line(error)}") from error


def loaded_lines(folder: RunFolder, name: str) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object in each line of the file ``name`` of a run, None for a line without one.

    Leave out an incomplete last line, which a killed driver may leave.

    Raises:
        LagomError: if there is such a file, and it cannot be read.
    """
    try:
        lines = folder.read(name).split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise LagomError(f"{folder.path / name} is damaged: {_one_line(error)}") from error
    for number, line in enumerate(lines):
        value = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
        is_last = number == len(lines) - 1
        if isinstance(value, dict) or not is_last:
            yield value if isinstance(value, dict) else None


@contextlib.contextmanager
def damage_named(folder: RunFolder) -> Iterator[None]:
    """Turn errors of the context into a ``LagomError`` that says that the records in ``folder`` are damaged.

    The records of another version, or ones that somebody has edited, have no digest, and may have any types.

    Raises:
        LagomError: if the context raises an error that is neither a ``LagomError`` nor a ``ValueError`` of lagom's.
    """
    try:
        yield
    except LagomError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {_one_line(error)}"
        raise LagomError(f"the records in {folder.path} are damaged, or of another version: {text}") from error


def as_json(value: Any, depth: int = 6, *, hide: bool = False) -> Any:
    """Return ``value`` in JSON's types, other objects as text, large values shortened, and large arrays as their shape.

    Args:
        depth: levels of containers to keep; deeper containers become text.
        hide: whether to replace values whose names look like a secret, at any depth, and parts of URLs by ``HIDDEN``.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        value = hide_in_urls(value) if hide and "://" in value else value
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "…"
    if depth and isinstance(value, Mapping):
        items = list(itertools.islice(value.items(), _MAX_ITEMS))
        left = {"…": f"{len(value) - len(items)} more"} if len(value) > len(items) else {}
        converted = {}
        for key, item in items:
            name = str(as_json(key, 0))
            converted[name] = HIDDEN if hide and is_secret(name, item) else as_json(item, depth - 1, hide=hide)
        return converted | left
    if depth and isinstance(value, (list, tuple)):
        more = [f"… {len(value) - _MAX_ITEMS} more"] if len(value) > _MAX_ITEMS else []
        return [as_json(item, depth - 1, hide=hide) for item in value[:_MAX_ITEMS]] + more
    try:
        text = _array_text(value) or (
            reprlib.repr(value) if isinstance(value, (Mapping, list, tuple, set, bytes)) else repr(value)
        )
    except Exception:  # a foreign __repr__ may raise anything
        text = f"<{type(value).__name__}>"
    text = hide_in_text(text) if hide else text
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


def _array_text(value: Any) -> str | None:
    """Return kind, shape and type of a large tensor or array, such as "tensor 64x20 float32"; None for other values.

    Tensors are recognized by their class's module, since a table of runs is printed without torch.
    """
    modules = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    shape = getattr(value, "shape", None) if modules & {"torch", "numpy"} else None
    if not isinstance(shape, tuple) or math.prod(shape) <= _MAX_ELEMENTS:
        return None
    kind = "tensor" if "torch" in modules else "array"
    return f"{kind} {'x'.join(map(str, shape))} {str(value.dtype).removeprefix('torch.')}"


def text_of(value: Any, limit: int) -> str:
    """Return a value from the records as text of at most ``limit`` characters on one line.

    A list that is too long is shown by its last number, the newest of a curve. Numbers of a dict come first.
    """
    if isinstance(value, dict):
        text = ", ".join(f"{key} {text_of(item, limit // 2)}" for key, item in numbers_first(value).items())
    else:
        text = _one_line(value)
    if len(text) > limit and isinstance(value, list) and isinstance(value[-1], (int, float)):
        text = f"[…, {_one_line(value[-1])}]"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def numbers_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the numbers before all else."""
    return dict(sorted(values.items(), key=lambda item: not isinstance(item[1], (int, float))))


def _one_line(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_one_line, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
