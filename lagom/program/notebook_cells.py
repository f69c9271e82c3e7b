"""Converts code cells of a notebook to Python: drops some magics; other lines that only IPython can run are errors."""

from __future__ import annotations

import json
import re
from typing import Any

_LEFT_OUT = ("autoreload", "config", "load_ext", "matplotlib", "reload_ext", "tensorboard")
"""Magics that are left out with their line: most concern only the display."""
_BEFORE_CODE = ("capture", "time")
"""Magics before code that also runs without the magic."""


def code_cells(text: str, name: str) -> tuple[str, ...]:
    """Return the Python of each code cell in the notebook ``text``, with its line numbers kept.

    Args:
        name: path of the notebook, for errors and the names of cells.

    Raises:
        ValueError: if ``text`` is not a Python notebook, or a cell has a line that only IPython can run.
        SyntaxError: if a cell is not valid Python; its ``filename`` is the name of the cell.
    """
    try:
        notebook: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is no notebook: {error}") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError(f"{name} is no notebook of format 4; open and save it with Jupyter")
    described = notebook.get("metadata", {})
    language = described.get("kernelspec", {}).get("language") or described.get("language_info", {}).get("name")
    if language not in (None, "python"):
        raise ValueError(f"{name} is a notebook of {language}; lagom runs Python")
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell.get("cell_type") == "code"]
    return tuple(_python(source, cell_name(name, number)) for number, source in enumerate(sources, 1))


def cell_name(path: str, number: int) -> str:
    """Return the name of the code cell ``number`` of the notebook ``path`` in tracebacks."""
    return f"{path}, code cell {number}"


def _python(source: str, name: str) -> str:
    """Return ``source`` without its magics, with the same number of lines."""
    lines = source.split("\n")
    if source.lstrip().startswith("%%"):
        first = next(number for number, line in enumerate(lines) if line.strip())
        lines[first] = _plain(lines[first], "%%", name, first)
    while (error := _error(lines, name)) is not None:
        number = (error.lineno or 0) - 1
        if not 0 <= number < len(lines) or not _is_ipythons(lines[number]):
            raise error
        lines[number] = _plain(lines[number], "%", name, number)
    return "\n".join(lines)


def _error(lines: list[str], name: str) -> SyntaxError | None:
    try:
        compile("\n".join(lines), name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    return None


def _is_ipythons(line: str) -> bool:
    text = line.strip()
    return text.startswith(("%", "!", "?")) or text.endswith("?") or bool(re.match(r"[\w., ]+=\s*[!%]", text))


def _plain(line: str, mark: str, name: str, number: int) -> str:
    """Return ``line`` without its magic.

    Raises:
        ValueError: if the magic cannot be dropped.
    """
    command = re.match(rf"(\s*){mark}(\w+)(.*)", line)
    code = command is not None and command[2] in _BEFORE_CODE
    if command is None or not (code or (command[2] in _LEFT_OUT and mark == "%")):
        raise ValueError(
            f"{name}, line {number + 1}: only IPython can run {line.strip()!r}; take it out of the notebook"
        )
    rest = command[3].strip() if code and mark == "%" else ""
    # An indented line becomes ``pass``, since its block needs a statement. At the top level the line becomes empty: an
    # import from __future__ must not come after a statement.
    return command[1] + (rest or "pass") if command[1] else rest
