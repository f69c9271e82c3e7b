"""``replaced``: the only place where lagom sets an attribute of torch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set ``owner.name`` to ``value``, then restore it; an inherited name is inherited again."""
    inherited = name not in vars(owner)
    # From the dict: the staticmethod or property itself, not the result of attribute access.
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
