"""A script file as a training function: run as ``__main__`` on the rank that calls it."""

from __future__ import annotations

import contextlib
import sys
import tokenize
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Script:
    """A compiled script and its arguments; calling it runs it as ``python path arguments...`` would.

    The source travels with it: executors need not have the file.
    """

    path: str
    """As it was given: ``sys.argv[0]``."""
    source: str
    arguments: tuple[str, ...]
    file: str = ""
    """The absolute path, which is what python calls the script in ``__file__`` and in tracebacks."""

    @classmethod
    def read(cls, path: Path, arguments: Sequence[str]) -> Script:
        """The script in ``path``, to be called with ``arguments``."""
        with tokenize.open(path) as file:  # in the encoding that the script names
            source = file.read()
        return cls(str(path), source, tuple(arguments), str(path.absolute()))

    @property
    def __name__(self) -> str:
        """What to call the run."""
        return Path(self.path).name

    @property
    def code(self) -> types.CodeType:
        """The compiled script; a SyntaxError names its line."""
        return compile(self.source, self.file or self.path, "exec", dont_inherit=True)

    def __call__(self) -> None:
        """Run the script."""
        main = types.ModuleType("__main__")
        main.__file__ = self.file or self.path
        main.__annotations__ = {}
        sys.modules["__main__"] = main  # where pickle looks for the script's classes
        sys.argv = [self.path, *self.arguments]
        folder = str(Path(self.file or self.path).resolve().parent)
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
        sys.path.insert(0, folder)
        try:
            exec(self.code, main.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
