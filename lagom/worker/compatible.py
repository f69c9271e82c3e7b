"""Serves packages of other projects in a run: the program's import of a package imports its part of ``lagom.compat``.

The parts are named by strings, because nothing may import ``lagom.compat``. Entry points would need an installed lagom,
which executors do not have: lagom travels with the run.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_BY_PACKAGE = {
    "horovod": "lagom.compat.horovod",
    "maggy": "lagom.compat.maggy",
    "petastorm": "lagom.compat.petastorm",
    "sparkdl": "lagom.compat.horovod",
}
"""Module to import before each package. A module with ``installed`` serves the package itself, from ``install`` to
``remove``, and its ``leave`` ends what a run has begun."""
_OF_DISTRIBUTED = ("horovod", "sparkdl")
"""Packages for programs that are distributed already; others may test for Horovod, and use it if they find it."""


@contextmanager
def compatible(already_distributed: bool = False) -> Iterator[None]:
    """Make the packages importable; import nothing until the program imports one."""
    finder = _First(
        {
            package: home
            for package, home in _BY_PACKAGE.items()
            if already_distributed or package not in _OF_DISTRIBUTED
        }
    )
    before = [module for module in _serving() if module.installed()]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in _serving():
            if hasattr(module, "leave"):
                module.leave()
            if module not in before:
                module.remove()


def _serving() -> list[Any]:
    found = [sys.modules.get(home) for home in sorted(set(_BY_PACKAGE.values()))]
    return [module for module in found if hasattr(module, "installed")]


class _First(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: Mapping[str, str]) -> None:
        self._wanted = dict(wanted)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        home = self._wanted.pop(name, None)  # pop: find_spec below calls this finder again
        if home is None:
            return None
        module: Any = sys.modules.get(home)
        if module is not None and (not hasattr(module, "installed") or module.installed()):
            return None
        module = importlib.import_module(home)
        if hasattr(module, "install"):
            module.install()
        return importlib.util.find_spec(name)
