"""``Resumption``: what another process needs that continues the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Learned: TypeAlias = Sequence[tuple[Any, Any]]
"""Pairs of an object of the program and a fact about it; the object is None for a fact about the whole program."""


@dataclass(eq=False)
class Resumption:
    """What another process needs that continues the run."""

    is_resumable: bool = False
    """Whether another process may continue the program, which must then compute alike."""
    services: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=dict)
    """By name, a function that returns the state of a library in this process, and one that sets it in another."""
    journal: str | None = None
    """File for the calls of trackers that a process which continues the run needs; None without one."""
    learned: dict[str, tuple[Callable[[], Learned], Callable[[Any], None]]] = field(default_factory=dict)
    """By name, a function that returns learned facts about the program, and one that sets them in another process."""
