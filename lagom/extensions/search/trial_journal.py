"""``TrialJournal``: the file with all trials of a search, which survives a killed driver."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lagom.errors import LagomError
from lagom.run_folder import RunFolder


class TrialJournal:
    """A backend of Optuna's ``JournalStorage`` with the format of its ``JournalFileBackend``, for one writer.

    An ablation study keeps its trials in such a file too, one JSON object a line, without Optuna.

    Optuna's own backend locks the file and waits for the disk (fsync) at each of about ten entries of a trial, which
    takes 20 ms and more. An entry of a ``TrialJournal`` survives a killed process, but may not survive a crash of the
    machine.

    Raises:
        LagomError: if another process has the journal open, so that its search is still running; if other users can
            write to it; or if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        self._entries = list(self._read())
        self._first = 0

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write ``logs`` to the end of the file."""
        if self._file.closed:  # the user goes on with Optuna's study after the search has ended
            self._file = self._open()
        self._file.write(b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs))
        self._file.flush()
        self._entries += logs

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Return the entries from number ``log_number_from`` on."""
        if log_number_from < self._first:
            self._entries = list(self._read())
            self._first = 0
        # A storage asks once for each entry, in order: earlier entries are not needed again.
        del self._entries[: log_number_from - self._first]
        self._first = log_number_from
        return iter(list(self._entries))

    def close(self) -> None:
        """Close the file; others may then write to it."""
        self._file.close()

    def _open(self) -> IO[bytes]:
        file = self._own_file()
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # child processes do not inherit it, unlike a flock
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.close()
                raise LagomError(
                    f"the search in {self._path.parent} is still running: another process writes to it"
                ) from None
        return file

    def _own_file(self) -> IO[bytes]:
        folder, name = RunFolder.open(self._path.parent), self._path.name
        try:
            return open(folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, own=folder.exists(name)), "a+b")
        finally:
            folder.close()

    def _read(self) -> Iterator[dict[str, Any]]:
        """Read all entries; cut off an incomplete last entry, which a killed process has left."""
        self._file.seek(0)
        length = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(length)
                break
            length += len(line)
            yield self._parsed(line)
        self._file.seek(0, os.SEEK_END)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                return entry
        raise LagomError(f"{self._path} is damaged: it has a line that is no JSON object")

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a pickled study go on with Optuna's own backend of the same file."""
        from optuna.storages.journal import JournalFileBackend

        return JournalFileBackend, (str(self._path),)
