"""``as_json``: any value in JSON's types, for the records of a run."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Mapping
from typing import Any

from lagom.records.secrets import HIDDEN, hide_in_text, is_secret

_MAX_TEXT = 20_000  # characters
_MAX_ITEMS = 200  # items of a list or a dict


def as_json(value: Any, depth: int = 6, *, hide: bool = False) -> Any:
    """Return ``value`` in JSON's types, other objects as text, and large values shortened.

    With ``hide``, values whose names look like a secret are left out, however deep.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "…"
    if depth and isinstance(value, Mapping):
        items = list(itertools.islice(value.items(), _MAX_ITEMS))
        left = {"…": f"{len(value) - len(items)} more"} if len(value) > len(items) else {}
        found = {}
        for key, item in items:
            name = str(as_json(key, 0))
            found[name] = HIDDEN if hide and is_secret(name, item) else as_json(item, depth - 1, hide=hide)
        return found | left
    if depth and isinstance(value, (list, tuple)):
        more = [f"… {len(value) - _MAX_ITEMS} more"] if len(value) > _MAX_ITEMS else []
        return [as_json(item, depth - 1, hide=hide) for item in value[:_MAX_ITEMS]] + more
    try:
        text = reprlib.repr(value) if isinstance(value, (Mapping, list, tuple, set, bytes)) else repr(value)
    except Exception:  # a foreign __repr__ may raise anything
        text = f"<{type(value).__name__}>"
    text = hide_in_text(text) if hide else text
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"
