"""``open_noted`` and ``GrowingStreams``: files of the program that lagom sees closed, or can flush."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class NotedFile(io.FileIO):
    """A file that calls ``closed_with`` with its last status after it has been closed."""

    closed_with: Callable[[os.stat_result], None]

    def close(self) -> None:
        """Close the file."""
        if self.closed:
            return
        status = os.fstat(self.fileno())
        super().close()
        self.closed_with(status)


def open_noted(
    file: Any,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
    opener: Callable[[Any, int], int],
    closed_with: Callable[[os.stat_result], None],
) -> Any:
    """Open ``file`` as ``io.open`` does, in a ``mode`` that creates or empties it.

    Args:
        closed_with: called with the file's last status after the program has closed it.
    """
    raw = NotedFile(os.fspath(file), "".join(letter for letter in mode if letter in "wx+"), opener=opener)
    raw.closed_with = closed_with
    result: Any = raw
    try:
        line_buffering = buffering == 1 or (buffering < 0 and raw.isatty())
        size = io.DEFAULT_BUFFER_SIZE
        if buffering > 1:
            size = buffering
        elif buffering < 0 or line_buffering:
            size = max(getattr(os.fstat(raw.fileno()), "st_blksize", 0), 1) if buffering < 0 else size
        if buffering == 0:
            return raw
        result = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" not in mode:
            result = io.TextIOWrapper(result, encoding, errors, newline, line_buffering)
            result.mode = mode
        return result
    except BaseException:
        result.close()
        raise


class GrowingStreams:
    """File objects to which the program writes, by weak reference; ``flush`` writes out their buffers."""

    def __init__(self) -> None:
        self._streams: list[weakref.ref[Any]] = []

    def add(self, stream: Any) -> None:
        """Add a stream with a ``flush`` method."""
        self._streams = [one for one in self._streams if one() is not None]
        self._streams.append(weakref.ref(stream))

    def flush(self) -> None:
        """Flush the streams that are open."""
        for one in self._streams:
            if (stream := one()) is not None:
                with suppress(Exception):  # the stream is closed, or the disk is full: the program gets its own error
                    stream.flush()
