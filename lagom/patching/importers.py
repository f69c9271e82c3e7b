"""``Importers`` finds modules that have imported a library's functions; ``on_import`` waits for imports to come."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import itertools
import operator
import sys
import threading
from collections.abc import Iterable
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec

all_importers: list[Importers] = []
"""All ``Importers`` of this process, for ``remember_importers``."""


class Importers:
    """Finds the functions ``names`` of ``home`` in ``home`` itself and in each module that has imported them.

    A module that has given an imported function another name is not found.
    """

    def __init__(self, home: ModuleType, *names: str) -> None:
        self._home = home
        self._names = names
        self._remembered: tuple[dict[str, object], list[tuple[ModuleType, str]], ModuleType] | None = None
        """Result of ``remember``: the functions, the places where they were found, and the newest module then."""
        all_importers.append(self)

    def find(self) -> list[tuple[ModuleType, str]]:
        """Return each module that has one of the functions, with the function's name."""
        functions = self._functions()
        if self._remembered is None or self._remembered[0] != functions:
            return _having(functions, list(sys.modules.values()))
        _, found, newest = self._remembered
        unchanged = [(module, name) for module, name in found if vars(module).get(name) is functions[name]]
        return unchanged + _having(functions, imported_after(newest))

    def remember(self) -> None:
        """Search all modules now, so that ``find`` searches only newer ones, until ``home`` has other functions."""
        self._remembered = self._functions(), self.find(), newest_module()

    def _functions(self) -> dict[str, object]:
        return {name: vars(self._home)[name] for name in self._names}


def newest_module() -> ModuleType:
    """Return the module that was imported last."""
    return next(reversed(sys.modules.values()))


def imported_after(newest: ModuleType) -> list[ModuleType]:
    """Return the modules that were imported after ``newest``, the last one first; all if ``newest`` is removed.

    Other modules are not touched, since in a forked process each access copies a page of memory.
    """
    # This loop is in C, so that no other thread imports a module meanwhile. Python moves a module to the end of
    # ``sys.modules`` once it has run.
    is_newer = functools.partial(operator.is_not, newest)
    return list(itertools.takewhile(is_newer, reversed(sys.modules.values())))


def remember_importers() -> None:
    """Search all modules now, so that processes forked from this one search only modules that they import themselves.

    A forked process copies the memory page of each module that it searches: 2,000 pages, 10 ms, in every rank.
    """
    for importers in all_importers:
        importers.remember()


def _having(functions: dict[str, object], modules: Iterable[ModuleType]) -> list[tuple[ModuleType, str]]:
    found = []
    for module in modules:
        known = getattr(module, "__dict__", {})
        found += [(module, name) for name, function in functions.items() if known.get(name) is function]
    return found


Change: TypeAlias = "Callable[[ModuleType], None]"


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
