"""``on_import``: what is done with a package's modules when the program imports them, and only then."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Change = Callable[[ModuleType], None]


@contextmanager
def on_import(changes: Mapping[str, Change]) -> Iterator[None]:
    """Call ``changes[name]`` with the module of that name: now if it has been imported, else when it is meanwhile."""
    finder = _Finder(changes)
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module where others do, and has its loader call us when it has run it."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes
        self._looking: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self._changes.get(name)
        if change is None or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            _then(spec.loader, change)
        return spec


def _then(loader: importlib.abc.Loader, change: Change) -> None:
    """Have this one ``loader`` call ``change`` with the module that it runs next; it keeps its type."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del vars(loader)["exec_module"]
        run(module)
        change(module)

    vars(loader)["exec_module"] = exec_module
