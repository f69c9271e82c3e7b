"""``ServedModules``: lets programs import modules of packages that are not installed. Standard library only.

Served modules have no file, so code that looks for files of the program's own, to send them along, finds none.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Fill = Callable[[ModuleType], None]
"""Gives a new module its names; it may also put another module into ``sys.modules`` in its place."""


class ServedModules(importlib.abc.MetaPathFinder):
    """Finds the modules of some packages in lagom, unless the packages are installed.

    Args:
        modules: every served module, with the function that fills it.
        instead: modules that are not served, with what to use.
        variable: environment variable, which reaches the ranks of a run; "force" serves the modules even where their
            packages are installed.
    """

    def __init__(self, modules: Mapping[str, Fill], instead: Mapping[str, str], variable: str) -> None:
        self._modules = modules
        self._instead = instead
        self._variable = variable
        self._packages = {name.partition(".")[0] for name in modules}
        self._has_set_variable = False

    def install(self, force: bool = False) -> None:
        """Serve the modules in this process and in the runs that it starts.

        Args:
            force: serve the modules even if their packages are installed; otherwise installed packages are left alone.
        """
        if force:
            os.environ[self._variable] = "force"
            self._has_set_variable = True
            self._forget(all_modules=True)
        if not self.installed() and not all(map(self._is_elsewhere, self._packages)):
            sys.meta_path.insert(0, self)

    def installed(self) -> bool:
        """Return whether the modules are served."""
        return self in sys.meta_path

    def remove(self) -> None:
        """Undo ``install``. A program that has imported a served module keeps it."""
        if self._has_set_variable:
            os.environ.pop(self._variable, None)
            self._has_set_variable = False
        if self.installed():
            sys.meta_path.remove(self)
            self._forget(all_modules=False)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a served module; return None for other modules, and for those of installed packages.

        Raises:
            ImportError: for a module that ``instead`` names.
        """
        package = name.partition(".")[0]
        if package not in self._packages or self._is_elsewhere(package):
            return None
        if name in self._instead:
            raise ImportError(f"{name} is not served by lagom; {self._instead[name]}", name=name)
        if name not in self._modules:
            return None
        is_package = any(other.startswith(name + ".") for other in (*self._modules, *self._instead))
        return importlib.util.spec_from_loader(name, _Loader(self._modules[name]), is_package=is_package)

    def _is_elsewhere(self, package: str) -> bool:
        """Return whether the package is installed and to be left alone; a mere folder or script does not count."""
        if os.environ.get(self._variable) == "force":
            return False
        others = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("lagom.")]
        specs = [finder.find_spec(package, None) for finder in others if hasattr(finder, "find_spec")]
        return any(spec and spec.origin and spec.submodule_search_locations is not None for spec in specs)

    def _forget(self, *, all_modules: bool) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in self._packages]:
            module = sys.modules[name]
            is_served = isinstance(module.__loader__, _Loader) or module.__name__.startswith("lagom.")
            if all_modules or is_served:
                del sys.modules[name]


class _Loader(importlib.abc.Loader):
    def __init__(self, fill: Fill) -> None:
        self._fill = fill

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._fill(module)
