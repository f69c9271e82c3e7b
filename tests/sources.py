"""Parses the sources of the project, for tests that judge them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


def trees(folder: str) -> Iterator[ast.Module]:
    """Yield the syntax tree of each Python file below ``folder`` of the project."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield ast.parse(path.read_text())


@contextmanager
def without_collections() -> Iterator[None]:
    """Let no garbage be collected in the block: collections take two thirds of the time of parsing many files."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
