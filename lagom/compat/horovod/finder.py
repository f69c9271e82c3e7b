"""Has ``import horovod.torch`` and ``from sparkdl import HorovodRunner`` find lagom; of the standard library alone.

See Note [Names of others].
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from lagom.compat.horovod import names

FORCE = "LAGOM_HOROVOD"
""""force" in this variable: lagom's modules also where others are installed, on all ranks."""


def install(force: bool = False) -> None:
    """Have this process, and the ranks of its runs, import Horovod's names from lagom.

    Args:
        force: also where Horovod is installed; otherwise that is left alone.
    """
    if force:
        os.environ[FORCE] = "force"
    finder = _Finder(force or os.environ.get(FORCE) == "force")
    sys.meta_path[:] = [other for other in sys.meta_path if not isinstance(other, _Finder)]
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()


def installed() -> bool:
    """Whether ``install`` was called, and not taken back."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def remove() -> None:
    """Take it back: imports find what they found before."""
    if installed():
        sys.meta_path[:] = [other for other in sys.meta_path if not isinstance(other, _Finder)]
        names.forget()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, force: bool) -> None:
        self.force = force

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del target
        if name.partition(".")[0] not in names.TOPS or (path is not None and list(path) != [names.PATH]):
            return None
        if name in names.INSTEAD:
            raise ImportError(f"{name} is not served by lagom; {names.INSTEAD[name]}", name=name)
        if not names.is_served(name) or (path is None and not self.force and self._is_installed(name)):
            return None
        spec = importlib.util.spec_from_loader(name, _Loader(), is_package=True)
        assert spec is not None
        spec.submodule_search_locations = [names.PATH]
        return spec

    def _is_installed(self, name: str) -> bool:
        """Whether others find such a package; a mere folder of that name, which has no origin, is none."""
        for other in sys.meta_path:
            if other is not self and hasattr(other, "find_spec"):
                spec = other.find_spec(name, None)
                if spec is not None and spec.origin is not None:
                    return True
        return False


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in names.ALIASES:
            # The import system takes what stands here in the end.
            sys.modules[name] = importlib.import_module(names.ALIASES[name])
        else:
            names.made(module)


# Note [Names of others]
#
# "horovod" and "sparkdl" are modules that are made, and have no file: what looks for files of the program's own, to
# send them along, finds none. "horovod.torch" and those below are lagom's own modules, by the same object. So a
# notebook's function that uses hvd as a global is pickled with a reference to lagom.compat.horovod.torch, which every
# rank has, whatever is installed there.
