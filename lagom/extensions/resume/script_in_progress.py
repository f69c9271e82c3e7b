"""``ScriptInProgress``: a script and the modules beside it, kept with their functions, and made anew without being run.

Their code has run once: it has printed, drawn random numbers and opened files. So what it has defined is put back, and
only the rest of the script runs. Modules of installed packages are imported again.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from lagom.extensions.resume.source_code import SourceFile
from lagom.patching.importers import imported_after, newest_module
from lagom.patching.replace import replaced
from lagom.program.script import FUTURE_FLAGS, Script
from lagom.program.sources import is_installed

_MAIN = "__main__"
_OF_IMPORT = {"__builtins__", "__cached__", "__loader__", "__path__", "__spec__"}
"""Variables of a module that its import makes."""


@dataclass(frozen=True, slots=True)
class ImportedModule:
    """One of the program's own modules, as it was imported."""

    name: str
    file: str
    text: str
    locations: Sequence[str] | None
    """Folders of its submodules, if it is a package."""


@dataclass(frozen=True, slots=True)
class ScriptImports:
    """Modules that a script has imported."""

    path: Sequence[tuple[int, str]]
    """Entries that it has added to ``sys.path``, with their places."""
    installed: Sequence[str]
    """Modules of installed packages, in the order of their imports."""
    own: Sequence[ImportedModule]


class ScriptInProgress:
    """The script of a call, if it is one, and the modules that it imports.

    Args:
        sources: source files of the program by name, to which those of the script and its modules are added.
        variables: variables of the program's modules by the modules' names, to which theirs are added as well.
    """

    def __init__(self, sources: dict[str, SourceFile], variables: dict[str, dict[str, Any]]) -> None:
        self._sources, self._variables = sources, variables
        self._script: Script | None = None
        self._files: dict[str, str] = {}
        self._path: list[str] = []
        self._newest = newest_module()

    def prepare(self, script: Script) -> Callable[[], None]:
        """Prepare to compile ``script`` so that its position can be read; return the function that runs it."""
        self._script, self._newest = script, newest_module()
        for (name, text), part in zip(script.texts(), script.parts, strict=True):
            self._sources[name] = SourceFile(name, text, is_script=True, flags=part.co_flags & FUTURE_FLAGS)
        return self._begin

    def _begin(self) -> None:
        self._make_main()
        assert self._script is not None
        self._script.run(self._parts(0))

    def _make_main(self) -> None:
        assert self._script is not None
        self._variables[_MAIN] = vars(self._script.make_main())
        self._path = list(sys.path)

    def _parts(self, first: int) -> Iterator[Callable[[], None]]:
        assert self._script is not None
        for name, _ in self._script.texts()[first:]:
            yield functools.partial(exec, self._sources[name].module_code, self._variables[_MAIN])

    @contextmanager
    def imports_noticed(self) -> Iterator[None]:
        """Compile the program's own modules that are imported in the block so that their positions can be read, too.

        Do nothing if the program is no script.
        """
        original = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if self._script is None or name.partition(".")[0] == "lagom" or is_installed(path):
                return original(loader, name)
            source = SourceFile(path, importlib.util.decode_source(loader.get_data(path)))
            self._sources[path], self._files[name] = source, path
            return source.module_code

        with replaced(SourceFileLoader, "get_code", get_code):
            yield

    @property
    def modules(self) -> Mapping[str, ModuleType]:
        """The modules that are kept with all that they define, by name."""
        names = [] if self._script is None else [_MAIN, *self._files]
        return {name: sys.modules[name] for name in names if name in sys.modules}

    def imports(self) -> ScriptImports | None:
        """Return what the script has imported; None if the program is no script."""
        if self._script is None:
            return None
        own = [module for name, module in self.modules.items() if name != _MAIN]
        self._variables.update((module.__name__, vars(module)) for module in own)
        return ScriptImports(
            [(place, entry) for place, entry in enumerate(sys.path) if entry not in self._path],
            [name for one in reversed(imported_after(self._newest)) if (name := _installed_name(one))],
            [self._imported(module) for module in own],
        )

    def _imported(self, module: ModuleType) -> ImportedModule:
        file = self._files[module.__name__]
        locations = list(module.__path__) if hasattr(module, "__path__") else None
        return ImportedModule(module.__name__, file, self._sources[file].text, locations)

    def kept(self, name: str, variables: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return all that the module ``name`` defines; None if it is no module of a script."""
        if self._script is None or (name != _MAIN and name not in self._files):
            return None
        return {key: value for key, value in variables.items() if key not in _OF_IMPORT}

    def make_again(self, imports: ScriptImports) -> None:
        """Make ``__main__`` and the script's own modules, still empty, and import those of installed packages."""
        self._make_main()
        for place, entry in imports.path:
            sys.path.insert(place, entry)
        for one in imports.own:
            spec = importlib.util.spec_from_file_location(
                one.name, one.file, submodule_search_locations=None if one.locations is None else [*one.locations]
            )
            assert spec is not None
            module = sys.modules[one.name] = importlib.util.module_from_spec(spec)
            self._sources[one.file], self._files[one.name] = SourceFile(one.file, one.text), one.file
            self._variables[one.name] = vars(module)
        for name in self.modules:
            self._variables[name]["__builtins__"] = vars(builtins)  # as running a module does
        for name in imports.installed:
            with contextlib.suppress(Exception):  # unpickling fails, and says so, if a value needs the module
                importlib.import_module(name)
        for one in imports.own:
            package, _, last = one.name.rpartition(".")
            if package:
                setattr(importlib.import_module(package), last, sys.modules[one.name])

    def rest(self, call: Callable[[], Any], file: str) -> Callable[[], None]:
        """Return a function that runs ``call``, the rest of the script's part in ``file``, and then the later parts."""
        assert self._script is not None
        later = [name for name, _ in self._script.texts()].index(file) + 1
        return functools.partial(self._script.run, [call, *self._parts(later)])


def _installed_name(module: ModuleType) -> str | None:
    """Return the name by which the module of an installed package is imported again."""
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    name: str | None = getattr(spec, "name", None)
    is_found = isinstance(file, str) and is_installed(file) and sys.modules.get(name or "") is module
    return name if is_found else None
