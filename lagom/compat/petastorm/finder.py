"""Imports petastorm with old names of pyarrow and numpy, which nobody else sees; of the standard library alone.

See Note [Another world for one package].
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

SHIM = "lagom_petastorm_shim.zip"
"""The archive that stands for petastorm on ``sys.path`` of processes without lagom; see ``travel``."""
_PACKAGE = "petastorm"
_VIEW = "petastorm._lagom_"
_SEEN = ("pyarrow", "pyarrow.parquet", "pyarrow.filesystem", "pyarrow.hdfs", "numpy", "distutils", "distutils.version")
"""Modules that petastorm sees otherwise than others do."""


def install() -> None:
    """Have this process import petastorm so; once is enough."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def view(name: str) -> ModuleType:
    """The module ``name`` as petastorm sees it: all that is in it, and the names that it lost."""
    return importlib.import_module(_VIEW + name.replace(".", "_"))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds petastorm's modules, and the views that they have of others."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith(_VIEW):
            for seen in _SEEN:
                if name == _VIEW + seen.replace(".", "_"):
                    return importlib.util.spec_from_loader(name, _View(seen))
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(name, path, target) if path is not None else _package()
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _package() -> ModuleSpec | None:
    """Where petastorm is. A script of that name, whose folder stands first on ``sys.path``, is not it."""
    for entry in sys.path:
        spec = PathFinder.find_spec(_PACKAGE, [entry]) if os.path.basename(entry) != SHIM else None
        if spec is not None and spec.submodule_search_locations is not None:
            _check_version()
            return spec
    return None


def _check_version() -> None:
    try:
        found = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return
    if found.startswith("0.13."):
        raise ImportError(
            f"petastorm {found} loses rows: its thread pool takes an epoch to be over while row groups are still being "
            "handed out. lagom works with the release before, which does not: pip install petastorm==0.12.1"
        )
    if not found.startswith("0.12."):
        raise ImportError(f"petastorm is {found}, and lagom knows 0.12.1: pip install petastorm==0.12.1")


class _Loader(SourceFileLoader):
    """Runs a module of petastorm's with an ``import`` of its own."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)
        importlib.import_module(f"{__package__}.mending").mend(module)


class _View(importlib.abc.Loader):
    """Makes a view of a module, which need not be there any more."""

    def __init__(self, seen: str) -> None:
        self._seen = seen

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        real = _real(self._seen)
        own = {name: value for name, value in vars(real).items() if not name.startswith("__")} if real else {}
        names = importlib.import_module(f"{__package__}.names")
        vars(module).update(own | names.added(self._seen, own))

        def other(name: str) -> Any:  # a submodule that was imported since, or what numpy makes when it is asked
            if real is None or (name.startswith("__") and name != "__version__"):
                raise AttributeError(f"{self._seen} has no {name!r} that petastorm could see")
            return getattr(real, name)

        vars(module)["__getattr__"] = other


def _real(name: str) -> ModuleType | None:
    if name.startswith("distutils"):  # where it is there still, it warns of its end
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _import(
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """What ``import`` calls in petastorm's modules."""
    top = name.partition(".")[0]
    if level or top not in _SEEN:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    if name not in _SEEN:
        found = builtins.__import__(name, globals, locals, fromlist or (), 0)
        return found if fromlist else view(top)
    whole = view(name)
    return whole if fromlist else view(top)


# Note [Another world for one package]
#
# Petastorm uses names that pyarrow and numpy have dropped: pyarrow.filesystem, the old ParquetDataset, np.unicode_. To
# put them back where they were would change what every other user of these packages sees: their ParquetDataset
# is another one, and libraries ask by hasattr which numpy they have. So petastorm alone gets them. A finder in front
# of sys.meta_path finds its modules where they are, and a loader runs each with a dict of builtins whose __import__
# answers "pyarrow" and a few more with a view: a module with all that is in the real one, and the old names. Python
# takes the __import__ of an import statement from the builtins of the module that the statement stands in, so this
# holds for imports inside of functions as well, and for no other package.
#
# Views have names below petastorm's. So what is pickled with a reference to one (functions that petastorm sends to
# Spark's executors) is found wherever petastorm is imported through this finder.
