"""``StatusLine``: a line on standard error that renews itself, among lines that stay."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from lagom.watch.notebook import with_cell_names

_TERMINAL_S = 0.5
_LOG_S = 10.0
WIDTH = 160
"""Characters of a line if a terminal does not say how many it has."""


class StatusLine:
    """Renews its line in a terminal; in a log, adds one now and then.

    Args:
        also: receives the lines that stay.
        every_s: seconds between two lines; by default fewer in a terminal than in a log.
        elsewhere: the state is shown in a notebook's cell instead.
    """

    def __init__(
        self, also: Callable[[str], None] | None = None, every_s: float | None = None, elsewhere: bool = False
    ) -> None:
        self._also = also
        self._elsewhere = elsewhere
        self._live = sys.stderr.isatty() or elsewhere
        self._every_s = every_s if every_s is not None else _TERMINAL_S if self._live else _LOG_S
        self._shown_at = time.monotonic() if not self._live else 0.0
        self._line = ""
        self._open = False
        """Whether the program has begun a line and not ended it."""

    def is_due(self) -> bool:
        """Return whether it is time to show the state again; the answer True counts as showing it."""
        if time.monotonic() - self._shown_at < self._every_s:
            return False
        self._shown_at = time.monotonic()
        return True

    def renew(self, text: Callable[[int], str]) -> None:
        """Show the state, which ``text`` returns as text of at most a given number of characters."""
        if self._open:
            return  # a line of progress would go into the program's own line, such as a bar
        if not self._live:
            sys.stderr.write(f"lagom: {text(WIDTH * 4)}\n")
        else:
            self._clear()
            self._line = f"lagom: {text(terminal_columns() - len('lagom: ') - 1)}"
            sys.stderr.write(self._line)
        sys.stderr.flush()

    def say(self, text: str) -> None:
        """Write a line that stays."""
        text = with_cell_names(text)
        self._clear()
        sys.stderr.write("\n" * self._open + text + "\n")
        self._open = False
        sys.stderr.flush()
        if self._also is not None:
            self._also(text)

    def say_outside_notebook(self, text: str) -> None:
        """Write a line that stays; in a notebook, whose cell has it as its title, only record it."""
        if not self._elsewhere:
            self.say(text)
        elif self._also is not None:
            self._also(text)

    def make_room(self, file: TextIO, text: str) -> None:
        """Make room for the program's ``text`` on ``file``, standard output or error."""
        self._clear()
        if file is sys.stderr or (self._live and not self._elsewhere and file.isatty()):
            self._open = not text.endswith("\n")

    def close(self) -> None:
        """End the line, so that the last state stays."""
        if self._line:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._line = ""

    def _clear(self) -> None:
        if self._line:
            blank = min(len(self._line), terminal_columns() - 1)  # the terminal may have become narrower
            sys.stderr.write("\r" + " " * blank + "\r")
            sys.stderr.flush()
            self._line = ""


def terminal_columns() -> int:
    """Return the width of the terminal in characters; ``WIDTH`` without a terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    except (OSError, ValueError, AttributeError):  # no terminal, or an object in its place
        return WIDTH
