"""Names of layers: patterns, outermost layers, and errors with the nearest name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from lagom.settings import nearest


def check_layer(name: str, names: Sequence[str], model: str) -> None:
    """Check that ``name`` is one of ``names``, the layers of ``model``.

    Raises:
        ValueError: if it is not, with the nearest name.
    """
    if name not in names:
        raise ValueError(f"{model} has no layer {name!r}{nearest(name, names) or _listed(names)}")


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the ``names`` that ``pattern`` matches; dotted names are matched part by part."""
    parts = pattern.split(".")

    def matches(name: str) -> bool:
        own = name.split(".")
        return len(own) == len(parts) and all(map(fnmatch.fnmatchcase, own, parts))

    return [name for name in names if matches(name)]


def outermost(names: Sequence[str]) -> list[str]:
    """Return ``names`` without the layers that are inside another layer in ``names``."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _listed(names: Sequence[str], limit: int = 12) -> str:
    if not names:
        return "; it has none"
    return f"; it has {', '.join(names[:limit])}{', ...' if len(names) > limit else ''}"
