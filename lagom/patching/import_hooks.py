"""``on_import``: changes modules of packages once they are imported, without importing them itself."""

from __future__ import annotations

import importlib.abc
import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Change = Callable[[ModuleType], None]


@contextmanager
def on_import(changes: Mapping[str, Change]) -> Iterator[None]:
    """Context manager that calls ``changes[name]`` with the module ``name``, at once or as soon as it is imported.

    The end of the context does not undo the changes.
    """
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
    """Finds a module on its path, and makes the module's loader call a change after it has run the module."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _then(spec.loader, self._changes[name])
        return spec


def _then(loader: importlib.abc.Loader, change: Change) -> None:
    """Make ``loader`` call ``change`` after it has run its next module; only this object changes, not its type."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del vars(loader)["exec_module"]
        run(module)
        change(module)

    vars(loader)["exec_module"] = exec_module
