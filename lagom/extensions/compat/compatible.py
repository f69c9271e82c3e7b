"""Import hook for packages of other projects, such as Horovod: their import first loads a module of this folder.

The modules are named by strings, because each of them replaces a library. Entry points would need an
installed lagom, which executors do not have, since lagom is sent with the run.
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
    "horovod": "lagom.extensions.compat.horovod",
    "maggy": "lagom.extensions.compat.maggy",
    "petastorm": "lagom.extensions.compat.petastorm",
    "sparkdl": "lagom.extensions.compat.horovod",
}
"""Module to import before each package. A module with ``installed`` replaces the package, from its ``install`` to its
``remove``. Its ``leave``, if it has one, is called at the end of each run."""
_OF_DISTRIBUTED = ("horovod", "sparkdl")
"""Packages replaced only for programs that are distributed already; other programs get an installed Horovod itself."""


@contextmanager
def compatible(already_distributed: bool = False) -> Iterator[None]:
    """Context manager in which ``_BY_PACKAGE`` has effect: a module is loaded when the program imports its package.

    Args:
        already_distributed: also provide the packages of ``_OF_DISTRIBUTED``.
    """
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
        home = self._wanted.pop(name, None)  # pop, since ``find_spec`` below calls this finder again
        if home is None:
            return None
        module: Any = sys.modules.get(home)
        if module is not None and (not hasattr(module, "installed") or module.installed()):
            return None
        module = importlib.import_module(home)
        if hasattr(module, "install"):
            module.install()
        return importlib.util.find_spec(name)
