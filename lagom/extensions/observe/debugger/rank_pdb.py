"""``RankPdb``: pdb on a rank, whose terminal is the driver's."""

from __future__ import annotations

import io
import os
import pdb
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lagom.extensions.observe.debugger.rank_debugger import RankDebugger

_MAX_TEXT = 80_000  # characters of one message, each up to 12 bytes of its JSON
_OWN = str(Path(__file__).parents[3]) + os.sep
_CALLERS = (os.path.join(_OWN, "on_rank") + os.sep, os.path.join(_OWN, "program", "script.py"))
"""Files that call the program."""


class DriverStream(io.TextIOBase):
    """The driver's terminal, as a file: writes are collected, and sent with the next read or by ``send``."""

    encoding = "utf-8"

    def __init__(self, debugger: RankDebugger) -> None:
        self._debugger = debugger
        self._text = ""

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._text += text
        return len(text)

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Send the text that was written, and return the line that the user types at the driver.

        The text after the last line end is the prompt.
        """
        return self._debugger.ask("line", self._sent())

    def send(self, step: str) -> None:
        """Send the text that was written, as a message of the kind ``step``."""
        self._debugger.tell(step, self._sent())

    def _sent(self) -> str:
        """Return the text that was written; of a text too long for a message, send all but the end first."""
        while len(self._text) > _MAX_TEXT:
            self._debugger.tell("text", self._text[:_MAX_TEXT])
            self._text = self._text[_MAX_TEXT:]
        text, self._text = self._text, ""
        return text


class RankPdb(pdb.Pdb):
    """A pdb that steps through the program, and over lagom's functions."""

    def __init__(self, debugger: RankDebugger) -> None:
        self._stream = DriverStream(debugger)
        file: Any = self._stream
        super().__init__(stdin=file, stdout=file, nosigint=True, skip=("lagom", "lagom.*"))
        self._debugger = debugger
        self._examines = False

    def examine(self, error: Exception) -> None:
        """Show ``error``, and open a prompt at the frames of its traceback."""
        self._examines = True
        self.message("".join(traceback.format_exception_only(error)).rstrip())
        self.reset()
        self.interaction(None, error.__traceback__)

    def interaction(self, frame: types.FrameType | None, traceback: Any) -> None:
        """Let the person at the driver type commands."""
        with self._debugger.at_prompt(self._stream):
            super().interaction(frame, traceback)

    def user_return(self, frame: types.FrameType, return_value: Any) -> None:
        """Stop at the end of a function; after the program's outermost function, do not stop any more."""
        super().user_return(frame, return_value)
        if frame.f_back is not None and _calls_program(frame.f_back):
            self.set_continue()

    def get_stack(self, f: Any, t: Any) -> Any:
        """Return pdb's stack without the program's callers and lagom's frames, and the index of the current frame."""
        stack, at = super().get_stack(f, t)
        start = next((n for n in range(len(stack) - 1, -1, -1) if _calls_program(stack[n][0])), -1) + 1
        of_program = [n for n in range(start, len(stack)) if not _is_own(stack[n][0])]
        if not of_program:  # lagom has failed before the program began
            return stack, at
        return [stack[n] for n in of_program], max(0, sum(n <= at for n in of_program) - 1)

    def do_quit(self, arg: str) -> Any:
        """End the run; after an exception, end the debugger."""
        if self._examines:
            return super().do_quit(arg)
        frame, line = self.stack[self.curindex]
        place = f"{os.path.basename(frame.f_code.co_filename)}:{line}, in {frame.f_code.co_name}"
        return self._debugger.ask("quit", place)  # the driver ends this process

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> Any:
        """Quit."""
        self.message("")
        return self.do_quit(arg)


def _calls_program(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_CALLERS)


def _is_own(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN)
