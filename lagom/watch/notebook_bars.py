"""``NotebookBars``: shows progress bars of a program in a notebook, where a stream would repeat them line by line."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

_PARTS = re.compile(r"(\n|\r|\x1b\[A)")
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours, which HTML does not have
_MAX_ROWS = 50


class NotebookBars:
    """Shows lines that a program renews by carriage returns in one display, until something else is printed."""

    def __init__(self, renew: Callable[[], Callable[[str, str], None]]) -> None:
        """Make displays by ``renew``, which returns a function that shows HTML, or text, in one place."""
        self._make = renew
        self._renew: Callable[[str, str], None] | None = None
        self._stream = ""
        self._rows = [""]
        self._row = 0
        self._at_start = True

    def takes(self, stream: str, text: str) -> bool:
        """Return whether ``text`` belongs to a bar: it renews its line, or a bar's line is unfinished."""
        return "\r" in text or (stream == self._stream and not self._is_over)

    @property
    def _is_over(self) -> bool:
        return self._row == len(self._rows) - 1 and not self._rows[self._row]

    def show(self, stream: str, text: str) -> None:
        """Apply ``text`` and its control characters to the lines, as a terminal does, and show the lines."""
        self._stream = stream
        if self._renew is None:
            self._renew = self._make()
        for part in _PARTS.split(text):
            if part == "\n":
                self._row += 1
                self._rows += [""] * (self._row == len(self._rows))
                self._at_start = True
            elif part == "\x1b[A":
                self._row = max(0, self._row - 1)
            elif part == "\r":
                self._at_start = True
            elif part := _STYLE.sub("", part):
                old = self._rows[self._row]
                self._rows[self._row] = part + old[len(part) :] if self._at_start else old + part
                self._at_start = False
        lines = [row.rstrip() for row in self._rows][-_MAX_ROWS:]
        shown = "\n".join(lines).rstrip("\n")
        self._renew(f"<pre style='margin:0;white-space:pre-wrap'>{html.escape(shown)}</pre>", shown)

    def end(self) -> None:
        """Leave finished bars as they are: the next bar gets a display of its own, below the text printed now."""
        if self._is_over:
            self._renew, self._rows, self._row = None, [""], 0
