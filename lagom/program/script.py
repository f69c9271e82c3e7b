"""``Script``: a script, module or notebook as a training function; a rank runs it as ``__main__``."""

from __future__ import annotations
import __future__ as futures

import contextlib
import functools
import importlib
import importlib.util
import linecache
import sys
import tokenize
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

FUTURE_FLAGS = sum(getattr(futures, name).compiler_flag for name in futures.all_feature_names)


@dataclass(frozen=True, slots=True)
class Script:
    """A script, module or notebook, and its arguments; a call runs it as ``python path arguments...`` would.

    The source is sent with the object, so executors need not have the file.
    """

    path: str
    """``sys.argv[0]``: the path as the user gave it; for a module the absolute path."""
    source: str
    """Text of the script or module; "" for a notebook."""
    arguments: tuple[str, ...]
    file: str = ""
    """Absolute path, for ``__file__`` and tracebacks."""
    module: str = ""
    """Dotted name of a module that is run as ``python -m module arguments...``; "" for a script or notebook."""
    cells: tuple[str, ...] = ()
    """Code cells of a notebook, which run one after another; empty for a script or module."""

    @classmethod
    def read(cls, path: Path, arguments: Sequence[str], module: str = "") -> Script:
        """Read the script or notebook in ``path``, to be called with ``arguments``.

        Args:
            module: dotted name, if the file is run as a module.

        Raises:
            ValueError: if ``path`` is not a script or notebook of Python.
            SyntaxError: if Python cannot compile it.
        """
        if path.is_dir():
            raise ValueError(f"{str(path)!r} is a folder; name a script in it, or run it as a module: lagom run -m")
        if not path.is_file():
            raise ValueError(f"there is no script {str(path)!r} here ({Path.cwd()})")
        source = _text(path)
        file = str(path.absolute())
        cells = _cells(source, file) if path.suffix == ".ipynb" else ()
        script = cls(str(path), "" if cells else source, tuple(arguments), file, module, cells)
        script.parts  # noqa: B018  (raises)
        return script

    @classmethod
    def of_module(cls, name: str, arguments: Sequence[str]) -> Script:
        """Find the module ``name`` as ``python -m`` does, and read its source, without importing its packages.

        Raises:
            ValueError: if there is no module of this name with Python source.
            SyntaxError: if Python cannot compile it.
        """
        spec = _find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package, with or without __init__.py
            name = f"{name}.__main__"
            spec = _find_spec(name)
        path = Path(spec.origin or "") if spec is not None else Path()
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(
                f"there is no module {name!r} in Python here ({Path.cwd()}); want one as in: -m package.train"
            )
        return cls.read(path.absolute(), arguments, name)

    @property
    def __name__(self) -> str:
        """Name of the run: the module's name, or the file's name without its folder."""
        return self.module or Path(self.path).name

    @property
    def package(self) -> str:
        """Package of the module, to which its relative imports refer; "" for a script or notebook."""
        return self.module.rpartition(".")[0]

    @property
    def parts(self) -> tuple[types.CodeType, ...]:
        """The compiled script, or the compiled cells of a notebook; a SyntaxError names the line."""
        parts, flags = [], 0
        for name, text in self.texts():
            parts.append(compile(text, name, "exec", flags, dont_inherit=True))
            flags |= parts[-1].co_flags & FUTURE_FLAGS  # a notebook's future imports hold in all later cells
        return tuple(parts)

    def is_edited(self) -> bool:
        """Return whether the content of the file has changed since it was read; False if it cannot be read now."""
        try:
            text = _text(Path(self.file))
            return _cells(text, self.file) != self.cells if self.cells else text != self.source
        except OSError:
            return False
        except (ValueError, SyntaxError):  # the file is no longer a script or notebook
            return True

    def __call__(self) -> None:
        """Run the script."""
        variables = vars(self.make_main())
        self.run(functools.partial(exec, part, variables) for part in self.parts)

    def make_main(self) -> types.ModuleType:
        """Make a new module ``__main__``, and set ``sys.argv`` and ``sys.path``, as Python does; return the module."""
        main = types.ModuleType("__main__")
        main.__file__ = self.file or self.path
        main.__annotations__ = {}
        if self.cells:
            vars(main)["display"] = print  # there is no cell in which IPython's ``display`` could show objects
        sys.modules["__main__"] = main  # pickle looks for the script's classes there
        sys.argv = [self.path, *self.arguments]
        folder = str(Path.cwd() if self.module else Path(self.file or self.path).resolve().parent)
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
        sys.path.insert(0, folder)
        if self.module:
            main.__spec__ = ModuleSpec(self.module, None, origin=self.file)
            main.__package__ = self.package
        # With this, tracebacks show the source of cells, and of files that executors do not have.
        for name, text in self.texts():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return main

    def run(self, parts: Iterable[Callable[[], object]]) -> None:
        """Call ``parts``, the whole script or its remaining part; ``sys.exit`` with status 0 or None is a normal end.

        The package of a module is imported first.
        """
        if self.package:
            importlib.import_module(self.package)
        try:
            for part in parts:
                part()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    def texts(self) -> list[tuple[str, str]]:
        """Return, for each of ``parts``, its name in tracebacks and its source."""
        name = self.file or self.path
        if not self.cells:
            return [(name, self.source)]
        from lagom.program.notebook_cells import cell_name

        return [(cell_name(name, number), cell) for number, cell in enumerate(self.cells, 1)]


def _cells(text: str, file: str) -> tuple[str, ...]:
    from lagom.program.notebook_cells import code_cells  # scripts and modules do not need it

    return code_cells(text, file)


def _text(path: Path) -> str:
    if b"\0" in path.read_bytes():
        raise ValueError(f"{str(path)!r} is no Python script: it has bytes that are no text")
    with tokenize.open(path) as file:  # decodes by the encoding that the script declares
        return file.read()


def _find_spec(name: str) -> ModuleSpec | None:
    first, *rest = name.split(".")
    full, spec = first, importlib.util.find_spec(first) if first else None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = f"{full}.{part}"
        spec = PathFinder.find_spec(full, list(spec.submodule_search_locations))
    return spec
