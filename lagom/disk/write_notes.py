"""``WriteNotes``: rank 0 tells the driver which files it is about to change, for a new attempt after a loss.

``open_noted`` and ``GrowingStreams`` let it see files closed, and flush them. See Note [Files of a lost attempt] in
restart/written_files.py.
"""

from __future__ import annotations

import io
import os
import stat
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from lagom.cluster import this_host
from lagom.restart.written_files import REWRITTEN, WrittenFiles, beside, identity_of, partial_folder
from lagom.wire.messages import FileNote

Tell = Callable[[FileNote], None]


class WriteNotes:
    """Notes on the files of rank 0; keys are absolute paths without links.

    Args:
        written: the files that earlier attempts have written.
        tell: sends a message to the driver.
        disk: the original functions of ``os``, which reach the real disk, by name.
    """

    def __init__(self, written: WrittenFiles, tell: Tell, disk: Mapping[str, Callable[..., Any]]) -> None:
        self._disk = disk
        self.has_siblings = not written.is_empty
        """Whether there may be files of lagom's own beside files of the program."""
        self._token = written.token
        self._send = tell
        self._pid = os.getpid()
        self._appended = {path for path, file in written.appended.items() if not file.in_place}
        self._emptied: dict[str, bool] = {}
        """Files that the program has created, emptied, replaced or changed in place, and whether each existed then."""
        self._made: set[str] = set()
        self._open: set[str] = set()
        self.streams = GrowingStreams()
        """Files to which the program writes; they are flushed before lengths are read."""

    @property
    def is_active(self) -> bool:
        """Whether this is the rank's own process; its forks must not use the connection that they inherit."""
        return os.getpid() == self._pid

    def tell(self, what: str, path: str, **details: Any) -> None:
        """Tell the driver that ``what`` happens to the file ``path``, with further facts ``details``."""
        self._send(FileNote(what=what, path=path, host=this_host(), details=details))

    def opens(self, key: str, flags: int) -> None:
        """Note that ``key`` is about to be opened with ``flags``."""
        if not flags & (os.O_WRONLY | os.O_RDWR) or not self.is_active:
            return
        status = self._status(key)
        if status is not None and not stat.S_ISREG(status.st_mode):
            return
        if flags & os.O_TRUNC:
            self._emptied.setdefault(key, status is not None)
            self._appended.discard(key)
        elif key in self._appended:
            return
        elif flags & os.O_APPEND:
            self._appended.add(key)
            begin = None if status is None else status.st_size
            if (was_there := self._emptied.get(key)) is not None:
                begin = REWRITTEN if was_there else None
            self.tell("appends", key, begin=begin, in_place=False)
        elif key not in self._emptied:
            self._emptied[key] = status is not None
            if status is None and flags & os.O_CREAT:
                self.tell("appends", key, begin=None, in_place=True)
            elif status is not None:
                self.tell("changes", key)

    def begins_whole(self, key: str, before: os.stat_result | None) -> None:
        """Note that a file is about to be written whole; ``before`` is its status, None if there is no file yet."""
        self._open.add(key)
        self.tell("writes", key, before=None if before is None else identity_of(before))

    def keeps_old(self, key: str, original: str) -> None:
        """Keep a file's earlier version beside it: link ``original`` there or, if that is ``key`` itself, rename it."""
        self.has_siblings = True
        old = beside(key, self._token, "old")
        with suppress(OSError):  # ``original`` is on another file system: a new attempt finds no earlier version
            if original != key:
                self._disk["link"](original, old)
            else:
                self._disk["rename"](key, old)

    def ended_whole(self, key: str, status: os.stat_result) -> None:
        """Note that the file has been closed with ``status``, and remove its earlier version."""
        if not self.is_active or key not in self._open:
            return
        self._open.discard(key)
        self.saved(key, status)
        with suppress(OSError):
            self._disk["unlink"](beside(key, self._token, "old"))

    def saved(self, key: str, status: os.stat_result) -> None:
        """Note that ``key`` is complete now, or is about to be."""
        self.tell("saved", key, identity=identity_of(status), lengths=self.lengths(self._appended))

    def lengths(self, paths: Collection[str] | None = None) -> dict[str, int]:
        """Flush the program's streams, and return the lengths of ``paths``, by default of all files that grow.

        These are the files to which the program appends, and open files that it writes whole.
        """
        self.streams.flush()
        lengths = {}
        for path in list(self._appended | self._open if paths is None else paths):  # another thread may add one
            if (other := self._status(path)) is not None:
                lengths[path] = other.st_size
        return lengths

    def moves(self, key: str, to: str) -> None:
        """Note that ``key`` is about to be renamed to ``to``."""
        status = self._status(key)
        if not self.is_active or status is None:
            return
        self.tell("renamed", key, to=to, replaces=os.path.lexists(to))
        if key in self._appended or to in self._appended:
            self._appended -= {key, to}
            self.tell("changes", to)
        if stat.S_ISDIR(status.st_mode):
            self.tell("moved", key, to=to)
        elif stat.S_ISREG(status.st_mode):
            self._emptied.setdefault(to, self._status(to) is not None)
            self.saved(to, status)

    def makes(self, key: str) -> None:
        """Note that a directory is about to be made."""
        if not self.is_active or os.path.lexists(key):
            return
        self._made.add(key)
        self.tell("begins to save" if key.endswith(partial_folder("")) else "made", key)

    def removes(self, key: str) -> None:
        """Note that ``key`` is about to be removed."""
        if self.is_active and os.path.lexists(key):
            self._made.discard(key)
            self.tell("gone", key)

    def finish(self) -> None:
        """Remove the earlier versions of files that the program has left open."""
        for key in self._open if self.is_active else ():
            with suppress(OSError):
                self._disk["unlink"](beside(key, self._token, "old"))

    def _status(self, path: str) -> os.stat_result | None:
        try:
            status: os.stat_result = self._disk["stat"](path)
        except OSError:
            return None
        return status


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
