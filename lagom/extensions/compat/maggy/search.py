"""``Searchspace``, and stand-ins for classes of Maggy that lagom does not serve; using a stand-in is an error."""

from __future__ import annotations

from typing import Any, NoReturn

from lagom.config import Searchspace

__all__ = ["Searchspace"]


def unserved(name: str, instead: str) -> type:
    """Return a class that stands for Maggy's ``name`` and raises when it is instantiated."""

    def __init__(self: Any, *args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"Maggy's {name} is not served by lagom; {instead}")

    return type(name, (), {"__init__": __init__, "__module__": __name__, "__doc__": f"Not served; {instead}."})
