"""Imports petastorm with old names of pyarrow and numpy, which nobody else sees. Standard library only.

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
"""Archive that stands for petastorm on ``sys.path`` of processes without lagom; see ``travel``."""
_PACKAGE = "petastorm"
_VIEW = "petastorm._lagom_"
_SEEN = ("pyarrow", "pyarrow.parquet", "pyarrow.filesystem", "pyarrow.hdfs", "numpy", "distutils", "distutils.version")
"""Modules that petastorm sees through a view."""


def install() -> None:
    """Put the finder in front of ``sys.meta_path``, once."""
    if not any(isinstance(finder, _PetastormFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PetastormFinder())


def view(name: str) -> ModuleType:
    """Return petastorm's view of the module ``name``: all its names, and old names that it does not have any more."""
    return importlib.import_module(_VIEW + name.replace(".", "_"))


class _PetastormFinder(importlib.abc.MetaPathFinder):
    """Finds petastorm's modules and their views of other modules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith(_VIEW):
            for seen in _SEEN:
                if name == _VIEW + seen.replace(".", "_"):
                    return importlib.util.spec_from_loader(name, _View(seen))
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(name, path, target) if path is not None else _find_package()
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _PetastormLoader(spec.loader.name, spec.loader.path)
        return spec


def _find_package() -> ModuleSpec | None:
    """Find petastorm; skip a script of that name, whose folder stands first on ``sys.path``.

    Raises:
        ImportError: if another release than 0.12 is installed, or none in a process that has only the archive.
    """
    for entry in sys.path:
        spec = PathFinder.find_spec(_PACKAGE, [entry]) if os.path.basename(entry) != SHIM else None
        if spec is not None and spec.submodule_search_locations is not None:
            _check_version()
            return spec
    if any(os.path.basename(entry) == SHIM for entry in sys.path):
        # Without an error, Python would find the archive again, which imports petastorm, and so on.
        raise ModuleNotFoundError(missing(sys.executable), name=_PACKAGE)
    return None


def missing(python: str) -> str:
    """Return an error text: ``python``, which Spark's workers or a pool's processes run, has no petastorm."""
    return (
        f"{python} has no petastorm, and Spark's Python workers (or petastorm's processes) run it: pip install "
        "petastorm==0.12.1 there, or set PYSPARK_PYTHON, before the session starts, to a Python that has it"
    )


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


class _PetastormLoader(SourceFileLoader):
    """Runs a module of petastorm with an ``__import__`` of its own, and then changes it by ``mending.mend``."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)
        importlib.import_module(f"{__package__}.mending").mend(module)


class _View(importlib.abc.Loader):
    """Fills a view of a module, which may no longer exist."""

    def __init__(self, seen: str) -> None:
        self._seen = seen

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        real = _real(self._seen)
        own = {name: value for name, value in vars(real).items() if not name.startswith("__")} if real else {}
        names = importlib.import_module(f"{__package__}.names")
        vars(module).update(own | names.old_names(self._seen, own))

        def find(name: str) -> Any:  # a submodule that was imported since, or a name that numpy creates on demand
            if real is None or (name.startswith("__") and name != "__version__"):
                raise AttributeError(f"{self._seen} has no {name!r} that petastorm could see")
            return getattr(real, name)

        vars(module)["__getattr__"] = find


def _real(name: str) -> ModuleType | None:
    if name.startswith("distutils"):  # where it still exists, it warns that it is deprecated
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
    """Import a module for petastorm: a view, or the module itself."""
    top = name.partition(".")[0]
    if level or top not in _SEEN:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    if name not in _SEEN:
        module = builtins.__import__(name, globals, locals, fromlist or (), 0)
        return module if fromlist else view(top)
    whole = view(name)
    return whole if fromlist else view(top)


# Note [Another world for one package]
#
# Petastorm uses names that pyarrow and numpy have dropped: pyarrow.filesystem, the old ParquetDataset, np.unicode_.
# Adding them to the real modules would change these for every other package: today's ParquetDataset is another class,
# and libraries ask by hasattr which numpy they have. So only petastorm gets them. A finder in front of sys.meta_path
# finds petastorm's modules, and a loader runs each with a dict of builtins whose __import__ answers "pyarrow" and a
# few more with a view: a module with all names of the real module, and the old names. Python takes the __import__ of an
# import statement from the builtins of the module around the statement, so imports inside functions get the view too,
# and no other package does.
#
# Views have names below petastorm's. So a pickled reference to a view (in functions that petastorm sends to Spark's
# executors) is found wherever petastorm is imported through this finder.
