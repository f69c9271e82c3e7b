"""``Output``: shows the ranks' output on the driver's own standard output and error."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from typing import TextIO

from lagom.watch.notebook import NotebookCell, notebook
from lagom.watch.notebook_bars import NotebookBars


class Output:
    """Shows rank 0's output unchanged, or the lines of every rank, each after the rank's name.

    Args:
        named: show all ranks, each line after "[rank 3] ".
        before: called with file and text before anything is written, to clear a line of progress.
    """

    def __init__(self, named: bool, before: Callable[[TextIO, str], None]) -> None:
        self._named = named
        self._before = before
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
        self._begun: dict[tuple[int, str], str] = {}
        display = notebook()
        self._bars = NotebookBars(lambda: NotebookCell(display).renew) if display is not None and not named else None

    def show(self, rank: int, stream: str, data: bytes) -> None:
        """Show ``data`` that ``rank`` wrote to "stdout" or "stderr"; it may begin or end within a character's bytes."""
        key = rank, stream
        if key not in self._decoders:
            self._decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoders[key].decode(data)
        if not self._named:
            if rank == 0:
                self.write(stream, text)
            return
        # A progress bar that renews its line would overwrite those of other ranks: each state becomes a line.
        *lines, self._begun[key] = (self._begun.get(key, "") + text.replace("\r\n", "\n").replace("\r", "\n")).split(
            "\n"
        )
        self.write(stream, "".join(f"[rank {rank}] {line}\n" for line in lines if line))

    def close(self) -> None:
        """Show lines that were never ended."""
        for (rank, stream), line in self._begun.items():
            if line:
                self.write(stream, f"[rank {rank}] {line}\n")
        self._begun.clear()

    def write(self, stream: str, text: str) -> None:
        """Write ``text`` to this process's ``stream``, "stdout" or "stderr"."""
        if not text:
            return
        lines = text.replace("\r\n", "\n")
        if self._bars is not None and self._bars.takes(stream, lines):
            self._bars.show(stream, lines)
        else:
            if self._bars is not None:
                self._bars.end()
            file = sys.stderr if stream == "stderr" else sys.stdout
            self._before(file, text)
            file.write(text)
            file.flush()
