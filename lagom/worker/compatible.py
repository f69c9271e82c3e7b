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
from typing import Any

_BY_PACKAGE = {"maggy": "lagom.compat.maggy", "petastorm": "lagom.compat.petastorm"}
"""What to import before a package; by name, as nothing here depends on it. Where it has ``installed``, it serves the
package itself, from ``install`` to ``remove``."""


@contextmanager
def compatible() -> Iterator[None]:
    """Have the program find these packages in working order; nothing is imported until it asks for one."""
    finder = _First()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in finder.installed:
            module.remove()


class _First(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.installed: list[Any] = []
        """What serves a package since the program asked for it."""
        self._seen: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        home = _BY_PACKAGE.get(name)
        if home is None or home in self._seen:
            return None
        self._seen.add(home)  # to look further comes here again
        module: Any = sys.modules.get(home)
        if module is not None and (not hasattr(module, "installed") or module.installed()):
            return None
        module = importlib.import_module(home)
        if hasattr(module, "install"):
            module.install()
            if module.installed():
                self.installed.append(module)
        return importlib.util.find_spec(name)
