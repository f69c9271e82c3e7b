"""``notebook``: IPython's display module, in a notebook; ``NotebookCell`` and ``with_cell_names`` for its cells."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

_PLACE = re.compile(r'File "(?P<quoted>[^"\n]+)", line (?P<line>\d+)|(?<!\S)(?P<bare>/[^\s:]+):(?P<number>\d+)')
"""A place in code as tracebacks write it, or as ``/path/to/file.py:3``."""


def notebook() -> Any:
    """Return IPython's display module if this process is a notebook's kernel, else None."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.display if _shell() is not None else None


def with_cell_names(text: str) -> str:
    """Return ``text`` with places in this notebook's cells named as the notebook does, such as "Cell In[3], line 2".

    A kernel compiles each cell as a file with a random name. Ranks report this name. IPython before 8.8 does not tell
    which cell it was: then nothing changes.
    """
    cell_of: Any = getattr(getattr(_shell(), "compile", None), "format_code_name", None)
    if cell_of is None:
        return text

    def name_place(place: re.Match[str]) -> str:
        found = cell_of(place["quoted"] or place["bare"])
        return f"{' '.join(found)}, line {place['line'] or place['number']}" if found else place[0]

    with contextlib.suppress(Exception):  # an error of IPython's must not hide the text
        return _PLACE.sub(name_place, text)
    return text


class NotebookCell:
    """Renews one display in a notebook's cell; front ends that show no HTML get the text."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def renew(self, page: str, text: str) -> None:
        """Show the HTML ``page``, or ``text``, in place of what was shown."""
        bundle = {"text/html": page, "text/plain": text}
        if self._handle is None:
            self._handle = self._display.display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _shell() -> Any:
    """Return IPython's shell if this process is a notebook's kernel, else None."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None
