"""``on_import``: changes modules of packages once they are imported, without importing them itself."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from contextlib import contextmanager
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
    """Has the other finders find a module, and makes the module's loader call a change after it has run the module."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes
        self._searches: set[tuple[str, int]] = set()
        """Modules that are searched for now, and the thread that searches."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changes or (search := (name, threading.get_ident())) in self._searches:
            return None
        self._searches.add(search)
        try:
            spec = importlib.util.find_spec(name)  # asks all finders, also this one, which then returns None
        finally:
            self._searches.remove(search)
        if spec is not None and spec.loader is not None:
            _then(spec.loader, self._changes[name])
        return spec


def _then(loader: importlib.abc.Loader, change: Change) -> None:
    """Make ``loader`` call ``change`` after it has run its next module; only this object changes, not its type."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # the outermost of several changes removes them all
        run(module)
        change(module)

    vars(loader)["exec_module"] = exec_module
