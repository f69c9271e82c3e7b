"""``RestoredFiles``: gives appended files the content back that fits the checkpoint which a new attempt reads.

See Note [Files of a lost attempt] in restart/prepared_files.py.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress

from lagom.restart.written_files import REWRITTEN, AppendedFile, SavedVersion, WrittenFiles, beside, identity_of

log = logging.getLogger("lagom")

Open = Callable[[str, int, int], int]
"""This rank's ``os.open``, which opens files on the real disk or on the rank's own."""


class RestoredFiles:
    """Files of lost attempts, on one rank of this attempt.

    Args:
        written: the files that the lost attempts have written.
        opened: opens a file on the disk of this rank.
        flush: flushes the buffers of the program's open files.
        resumed: called with the checkpoint that the program goes on from, and the time when it was saved.
    """

    def __init__(
        self,
        written: WrittenFiles,
        opened: Open,
        flush: Callable[[], None],
        resumed: Callable[[str, float], None] = lambda path, at: None,
    ) -> None:
        self._flush = flush
        self._written = written
        self._open = opened
        self._resumed = resumed
        self._at = 0.0
        self._lengths: dict[str, int] = {}
        self._created = set(written.saved) | written.made
        """Files and directories that a lost attempt has made, and that this attempt has not made yet."""

    def created(self, key: str) -> bool:
        """Return whether a lost attempt made ``key``; if so, ``key`` counts as made by this attempt from now on."""
        if key not in self._created:
            return False
        self.changes(key)
        return True

    def is_done(self, key: str) -> bool:
        """Return whether a lost attempt removed ``key``, or renamed it over another file, after the snapshot.

        True only once for a key.
        """
        return self._written.snapshot_at is not None and self._written.gone.pop(key, None) is not None

    def changes(self, key: str) -> None:
        """Note that this attempt has made, emptied, removed or renamed ``key``, which is no longer a lost attempt's."""
        self._created.discard(key)
        self._written.saved.pop(key, None)

    def reads(self, key: str) -> None:
        """Note that the program reads ``key``.

        If a lost attempt has saved ``key``, and there is no snapshot, the program goes on from this checkpoint:
        appended files get back the content that they had when the checkpoint was saved.
        """
        if key not in self._written.saved:
            return
        try:
            version = self._written.version(key, identity_of(os.stat(key)))
        except OSError:
            return
        if version is None:
            del self._written.saved[key]
            if self._written.appended:
                log.warning("%s is not as the lost attempt saved it; appended files stay as when the run began", key)
            return
        if self._written.snapshot_at is not None:
            if version.at > self._written.snapshot_at:
                log.warning("%s is as the lost attempt wrote it after the snapshot", key)
        elif version.at > self._at:
            self._at = version.at
            self._resumed(key, version.at)
            self._flush()
            for path, file in self._written.appended.items():
                with suppress(OSError):
                    self._restore(path, file, version)

    def _restore(self, path: str, file: AppendedFile, version: SavedVersion) -> None:
        """Give ``path`` back the content that it had when ``version`` was saved, then what this attempt appended."""
        lost = beside(path, self._written.token, "lost")
        if file.in_place:
            self._bring_back(path, lost)
            return
        if path not in version.lengths or not os.path.exists(lost):
            return
        length = min(version.lengths[path], os.path.getsize(lost))
        begin = 0 if file.begin == REWRITTEN else file.begin or 0
        with open(lost, "rb") as kept, os.fdopen(self._open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as target:
            start = os.path.getsize(lost) if file.begin == REWRITTEN else self._lengths.get(path, begin)
            target.seek(start)
            own = target.read()
            kept.seek(begin)
            content = _joined(kept.read(max(0, length - begin)), own)
            target.seek(begin)
            target.write(content)
            target.truncate()
        self._lengths[path] = length
        if begin == 0 and file.begin is None:
            shutil.copymode(lost, path)

    def _bring_back(self, path: str, lost: str) -> None:
        if os.path.exists(lost) and not os.path.exists(path):
            with open(lost, "rb") as kept, os.fdopen(self._open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as target:
                shutil.copyfileobj(kept, target, 1 << 20)
            log.warning("%s is as it was when the rank was lost, not as when the checkpoint was saved", path)


def _joined(lost: bytes, own: bytes) -> bytes:
    """Return ``lost`` followed by ``own``; if one of them begins with the other, return the longer one."""
    if lost.startswith(own):
        return lost
    return own if own.startswith(lost) else lost + own
