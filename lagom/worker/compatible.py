"""Packages that do not work beside today's others, and the parts of lagom that have them work when imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

_BY_PACKAGE = {"petastorm": "lagom.compat.petastorm"}
"""What to import before a package; by name, as nothing here depends on it."""


@contextmanager
def compatible() -> Iterator[None]:
    """Have the program find these packages in working order; nothing is imported until it asks for one."""
    finder = _First()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _First(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _BY_PACKAGE or _BY_PACKAGE[name] in sys.modules:
            return None
        importlib.import_module(_BY_PACKAGE[name])
        return importlib.util.find_spec(name)
