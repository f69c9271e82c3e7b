"""``ProtectedFirstRank`` and ``RestoringRank``: file functions of ranks whose run may restart after a loss.

``RestoredFiles`` gives appended files the content back that fits the checkpoint which a new attempt reads. See Note
[Files of a lost attempt] in restart/written_files.py.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lagom.disk.calls import FileCalls, Scan
from lagom.disk.first_rank import FirstRankCalls
from lagom.disk.journal import Journal
from lagom.disk.other_ranks import OtherRankCalls
from lagom.disk.write_notes import GrowingStreams, Tell, WriteNotes, open_noted
from lagom.restart.written_files import (
    REWRITTEN,
    AppendedFile,
    SavedVersion,
    WrittenFiles,
    beside,
    identity_of,
    is_sibling,
    remove_siblings,
)

Key = Callable[..., str | None]
"""Takes path, dir_fd and whether to follow links; returns the path's key (see overlay.py); None: it is left alone."""


_PLAIN = {(mode, -1, None, None, None) for mode in ("w", "wt", "wb", "w+", "wb+", "w+b", "x", "xb")}
"""Common arguments of ``io.open`` (mode, buffering, encoding, errors, newline), known to be valid."""


class ProtectedFirstRank(FirstRankCalls):
    """File functions of rank 0 in a run that may restart after a loss.

    They tell the driver before the program writes a file whole, appends to a file or changes it in place, makes a
    directory, or renames or removes a path. They keep the earlier version of a file that is written whole. In a new
    attempt, they restore the files of the lost attempt.
    """

    def __init__(self, host_dir: str, by_name: bool, journal: Journal, written: WrittenFiles, tell: Tell) -> None:
        super().__init__(host_dir, by_name, journal)
        self.notes = WriteNotes(written, tell, self.original)
        self._written = written

    def replacements(self) -> dict[str, Any]:
        functions = super().replacements()
        if not self._written.is_empty:
            restored = RestoredFiles(
                self._written,
                functions["open"],
                self.notes.streams.flush,
                lambda path, at: self.notes.tell("resumed", path, at=at),
            )
            _restore(functions, restored, self.own_key)
        functions["open"] = _before(functions["open"], self._tell_opening)
        functions["mkdir"] = _before(functions["mkdir"], self._telling(self.notes.makes))
        for name in ("unlink", "remove", "rmdir"):
            functions[name] = _before(functions[name], self._telling(self.notes.removes))
        for name in ("rename", "replace"):
            functions[name] = _before(functions[name], self._tell_renaming)
        for name in ("listdir", "scandir"):
            functions[name] = _without_siblings(self, functions[name], lambda: self.notes.has_siblings)
        return functions | {"io.open": self._io_open(functions["open"], super().io_open(functions["open"]))}

    def take_tracked(self) -> set[str]:
        """Return the ids of the trackers' runs that lost attempts have begun, and forget them.

        Empty if the run goes on from a snapshot, as then the trackers' runs go on too.
        """
        if self._written.snapshot_at is not None:
            return set()
        found, self._written.tracked = self._written.tracked, set()
        return found

    def finish(self) -> None:
        """Remove the files that lagom keeps beside the program's files."""
        self.notes.finish()
        if self.notes.is_active:
            remove_siblings(self._written)

    # Each of these functions takes the arguments of the function of ``os`` before which it is called.

    def _tell_opening(self, path: Any, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> None:
        if flags & (os.O_WRONLY | os.O_RDWR) and (key := self.own_key(path, dir_fd)) is not None:
            self.notes.opens(key, flags)

    def _telling(self, tell: Callable[[str], None]) -> Callable[..., None]:
        def tell_name(path: Any, mode: int = 0, *, dir_fd: int | None = None) -> None:
            if (key := self.own_key(path, dir_fd, follow=False)) is not None:
                tell(key)

        return tell_name

    def _tell_renaming(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        key, to = self.own_key(src, src_dir_fd, follow=False), self.own_key(dst, dst_dir_fd, follow=False)
        if key is not None and to is not None:
            self.notes.moves(key, to)

    def _io_open(self, opened: Callable[..., int], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return an ``io.open`` for rank 0 that notes when the files that it has created or emptied are closed."""

        @functools.wraps(plain)
        def call(
            file: Any,
            mode: Any = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            key = None
            if opener is None and self.notes.is_active and isinstance(mode, str) and not isinstance(file, int):
                key = self.own_key(file) if set(mode) & set("wxa") else None
            if key is None or (not self._is_replaceable(key) and "a" not in mode):
                own = {} if opener is None else {"opener": opener}
                return plain(file, mode, buffering, encoding, errors, newline, closefd, **own)
            if "a" in mode:
                result = plain(file, mode, buffering, encoding, errors, newline)
                self.notes.streams.add(result)
                return result
            if (mode, buffering, encoding, errors, newline) not in _PLAIN:
                self._check_arguments(mode, buffering, encoding, errors, newline)
            self._begin_whole(file, key, mode)
            result = open_noted(
                file,
                mode,
                buffering,
                encoding,
                errors,
                newline,
                lambda path, flags: opened(path, flags, 0o666),
                lambda status: self.notes.ended_whole(key, status),
            )
            self.notes.streams.add(result)  # a snapshot flushes the file, to record its length
            return result

        return call

    def _is_replaceable(self, key: str) -> bool:
        """Return whether ``key`` is a regular file of this user without other hard links, or does not exist yet."""
        try:
            status = os.lstat(key)
        except OSError:
            return os.path.isdir(os.path.dirname(key))
        return os.path.isfile(key) and status.st_nlink == 1 and status.st_uid == os.geteuid()

    def _check_arguments(self, mode: str, *others: Any) -> None:
        """Raise the error of ``io.open`` for wrong arguments, before the file is changed."""
        self.original["io.open"](os.devnull, mode.replace("x", "w"), *others).close()

    def _begin_whole(self, file: Any, key: str, mode: str) -> None:
        """Keep the earlier version of a file that is about to be written whole, if there is one."""
        try:
            before = self.original["lstat"](key)
        except OSError:
            self.notes.begins_whole(key, None)
            return
        if "x" in mode:
            return  # ``open`` will fail, or this attempt takes the file over from a lost attempt
        self.notes.begins_whole(key, before)
        self.note_truncation(file)
        is_renewed = self.original["lstat"](key).st_ino != before.st_ino
        self.notes.keeps_old(key, (self.original_of(key) or key) if is_renewed else key)
        if not is_renewed:  # ``keeps_old`` has renamed the file, so make an empty one with the same permissions
            os.close(self.original["open"](key, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.original["chmod"](key, before.st_mode & 0o7777)


class RestoringRank(OtherRankCalls):
    """File functions of a rank other than 0 in a new attempt: they restore files of a lost attempt in its overlay."""

    def __init__(self, host_dir: str, by_name: bool, journal: Journal, folder: str, written: WrittenFiles) -> None:
        super().__init__(host_dir, by_name, journal, folder)
        self._written = written

    def replacements(self) -> dict[str, Any]:
        functions = super().replacements()
        streams = GrowingStreams()
        _restore(functions, RestoredFiles(self._written, functions["open"], streams.flush), self._own_key)
        for name in ("listdir", "scandir"):
            functions[name] = _without_siblings(self, functions[name], lambda: True)
        opened = self.io_open(functions["open"])

        @functools.wraps(opened)
        def io_open(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            result = opened(file, mode, *args, **kwargs)
            if isinstance(mode, str) and "a" in mode:
                streams.add(result)
            return result

        return functions | {"io.open": io_open}

    def _own_key(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str | None:
        absolute = self.absolute(path, dir_fd)
        if absolute is None:
            return None
        key: str = self._inside(lambda: self.overlay.key(absolute, follow), path)
        return None if self.left_alone(key) else key


def _before(call: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Wrap ``call``: ``note`` is called first, with the same arguments."""

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return call(*args, **kwargs)

    return noted


def _restore(functions: dict[str, Any], restored: RestoredFiles, key_of: Key) -> None:
    """Replace ``functions`` by some that succeed once more on what a lost attempt made, removed or renamed.

    A read of a checkpoint of a lost attempt restores the appended files.
    """
    open_before, mkdir_before = functions["open"], functions["mkdir"]

    @functools.wraps(open_before)
    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        key = key_of(path, dir_fd)
        if key is None:
            return open_before(path, flags, mode, dir_fd=dir_fd)
        if not flags & (os.O_WRONLY | os.O_RDWR):
            restored.reads(key)
        elif flags & os.O_EXCL and restored.created(key):
            flags = flags & ~os.O_EXCL | os.O_TRUNC
        elif flags & os.O_TRUNC:
            restored.changes(key)
        return open_before(path, flags, mode, dir_fd=dir_fd)

    @functools.wraps(mkdir_before)
    def mkdir(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        try:
            return mkdir_before(path, *args, dir_fd=dir_fd, **kwargs)
        except FileExistsError:
            key = key_of(path, dir_fd, False)
            if key is None or not restored.created(key):
                raise

    def key_to_remove(path: Any, *, dir_fd: int | None = None) -> list[str | None]:
        return [key_of(path, dir_fd, False)]

    def keys_to_rename(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> list[str | None]:
        return [key_of(src, src_dir_fd, False), key_of(dst, dst_dir_fd, False)]

    functions["open"], functions["mkdir"] = open_, mkdir
    for name in ("unlink", "remove", "rmdir"):
        functions[name] = _once_more(functions[name], restored, key_to_remove)
    for name in ("rename", "replace"):
        functions[name] = _once_more(functions[name], restored, keys_to_rename)


def _once_more(
    change: Callable[..., Any], restored: RestoredFiles, keys_of: Callable[..., list[str | None]]
) -> Callable[..., Any]:
    """Wrap a function that removes or renames a path: it succeeds if a lost attempt did so after the snapshot.

    ``keys_of`` takes the same arguments, and returns the keys of all paths that change, first the one that vanishes.
    """

    @functools.wraps(change)
    def call(*args: Any, **kwargs: Any) -> Any:
        keys = keys_of(*args, **kwargs)
        for key in keys:
            if key is not None:
                restored.changes(key)
        try:
            return change(*args, **kwargs)
        except FileNotFoundError:
            if keys[0] is None or not restored.is_done(keys[0]):
                raise

    return call


def _without_siblings(calls: FileCalls, listing: Callable[..., Any], may_be: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap ``listdir`` or ``scandir`` to leave out files that lagom keeps beside the program's.

    ``may_be`` returns whether there may be such files.
    """

    @functools.wraps(listing)
    def call(path: Any = ".") -> Any:
        found = listing(path)
        if calls.own.inside or not may_be():
            return found
        if isinstance(found, list):
            return [name for name in found if not is_sibling(os.fsdecode(name))]
        with found:
            return Scan([entry for entry in found if not is_sibling(os.fsdecode(entry.name))])

    return call


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
