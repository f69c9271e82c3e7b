"""``RestoredFiles``: on a rank of a new attempt, gives back what belongs to a checkpoint that the program reads.

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
"""``os.open`` as this rank has it: the real disk or its own."""


class RestoredFiles:
    """Files that earlier attempts have written, as one rank of this attempt finds them.

    Args:
        written: what those attempts have written.
        opened: opens a file on the disk of this rank.
        flush: writes out what the program's own open files still hold back.
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
        """Files that a lost attempt has made, and this one not yet."""

    def created(self, key: str) -> bool:
        """Return whether a lost attempt made ``key``; from now on it counts as made by this one."""
        if key not in self._created:
            return False
        self.changes(key)
        return True

    def is_done(self, key: str) -> bool:
        """Return whether a lost attempt has removed ``key``, or renamed it, after the snapshot; it counts once."""
        return self._written.snapshot_at is not None and self._written.gone.pop(key, None) is not None

    def changes(self, key: str) -> None:
        """Note that this attempt has made, emptied, removed or renamed ``key``: it is no longer the lost one's."""
        self._created.discard(key)
        self._written.saved.pop(key, None)

    def reads(self, key: str) -> None:
        """Note that the program reads ``key``; if a lost attempt has saved it, the program goes on from there."""
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
        """Give ``path`` back what it had when ``version`` was saved; what this attempt has appended follows."""
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
    """Return both; once what one repeats of the other."""
    if lost.startswith(own):
        return lost
    return own if own.startswith(lost) else lost + own
