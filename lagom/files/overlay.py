"""``Overlay``: changes of a rank other than 0 to its disk, kept in a folder of its own."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from typing import NoReturn

from lagom.files.journal import copy, join, parent
from lagom.files.view import View

_UNNAMED = getattr(os, "O_TMPFILE", os.O_DIRECTORY)


class Overlay(View):
    """Each method changes ``key`` as the function of ``os`` would, with the same errors.

    The caller sets the names of files in the exceptions.
    """

    def open(self, key: str, flags: int, mode: int) -> int:
        """Open as ``os.open``; ``key`` was resolved as ``flags`` say, with links followed or not."""
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and flags & _UNNAMED != _UNNAMED
        if not writes or self.goes_real(key):
            return self.read(key, lambda place: os.open(place, flags, mode), os.close)
        found = self.mode(key)
        if not found:
            if not flags & os.O_CREAT:
                self._check_is_directory(parent(key))
                _refuse(errno.ENOENT)
            fd = os.open(self._prepared(key), flags, mode)
            self._put(key)
            return fd
        if flags & os.O_CREAT and flags & os.O_EXCL:
            _refuse(errno.EEXIST)
        if not stat.S_ISREG(found) or self.is_own(key):
            # A pipe or a device is the real one; a directory is refused.
            return self.read(key, lambda place: os.open(place, flags & ~os.O_CREAT, mode), os.close)
        if not self.read(key, lambda place: os.access(place, os.W_OK)):
            _refuse(errno.EACCES)
        return os.open(self.copied_up(key, keep_content=not flags & os.O_TRUNC), flags, mode)

    def mkdir(self, key: str, mode: int) -> None:
        """Make a directory as ``os.mkdir``."""
        if self.goes_real(key):
            os.mkdir(key, mode)
            return
        if self.mode(key):
            _refuse(errno.EEXIST)
        place = self._prepared(key)
        os.mkdir(place, mode)
        self._put(key)

    def symlink(self, target: str | bytes, key: str) -> None:
        """Make a link as ``os.symlink``; ``target`` stays as the program gave it."""
        if self.goes_real(key):
            os.symlink(target, key)
            return
        if self.mode(key):
            _refuse(errno.EEXIST)
        os.symlink(os.fsdecode(target), self._prepared(key))
        self._put(key)

    def link(self, source: str, key: str) -> None:
        """Make a hard link as ``os.link``."""
        if self.goes_real(key) and self.place(source) == source:
            os.link(source, key)
            return
        mode = self.lstat(source).st_mode
        if self.mode(key):
            _refuse(errno.EEXIST)
        place = self._prepared(key)
        if stat.S_ISDIR(mode):
            _refuse(errno.EPERM)
        os.link(self.copied_up(source), place)
        self._put(key)

    def unlink(self, key: str) -> None:
        """Remove a file as ``os.unlink``."""
        if self.goes_real(key):
            os.unlink(key)
            return
        if stat.S_ISDIR(self.lstat(key).st_mode):
            _refuse(errno.EISDIR)
        self._check_may_change(parent(key))
        if self.is_own(key):
            os.unlink(self.upper + key)
        self._drop(key)

    def rmdir(self, key: str) -> None:
        """Remove a directory as ``os.rmdir``."""
        if self.goes_real(key):
            os.rmdir(key)
            return
        self._check_empty(key)
        self._check_may_change(parent(key))
        clear(self.upper + key)
        self._drop(key, directory=True)

    def rename(self, key: str, to: str) -> None:
        """Rename as ``os.rename`` and ``os.replace``."""
        from_real, to_real = self.goes_real(key), self.goes_real(to)
        if from_real and to_real:
            os.rename(key, to)
            return
        for directory in (parent(key), parent(to)):
            self._check_is_directory(directory)
        mode, replaced = self.lstat(key).st_mode, self.mode(to)
        if key == to or (replaced and os.path.samestat(self.lstat(key), self.lstat(to))):
            return  # POSIX keeps both names of one file
        whole = stat.S_ISDIR(mode)
        if whole and to.startswith(key + "/"):
            _refuse(errno.EINVAL)
        if key.startswith(to + "/"):
            _refuse(errno.ENOTEMPTY)
        if replaced and whole:
            self._check_empty(to)
        elif replaced and stat.S_ISDIR(replaced):
            _refuse(errno.EISDIR)
        self._check_may_change(parent(key))
        place = to if to_real else self._prepared(to)
        _move(key if from_real else self._whole(key), place)
        if not to_real:
            self._put(to, tree=whole)
        if not from_real:
            self._drop(key, whole)

    def copied_up(self, key: str, keep_content: bool = True) -> str:
        """Return the path of the rank's own copy of the file ``key``, made if missing; "" for a common directory."""
        mode = self.lstat(key).st_mode
        if self.is_own(key):
            return self.upper + key
        if stat.S_ISDIR(mode):
            return ""  # the first rank changes its mode and times
        os.makedirs(self.upper + parent(key), exist_ok=True)
        partial = self._partial()
        if stat.S_ISLNK(mode):
            os.symlink(self.read(key, os.readlink), partial)
        elif keep_content:
            self.read(key, lambda place: copy(place, partial))
        else:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
            os.chmod(partial, stat.S_IMODE(mode))
        os.rename(partial, self.upper + key)
        self.log.add("put", key)
        return self.upper + key

    def goes_real(self, key: str) -> bool:
        """Return whether a change of ``key`` goes to the real disk, and prepare the disk for it."""
        if self.left_alone(key):
            return True
        own = self.log.nearest(key)
        if own is not None and own[1].kind == "free":
            return True
        if not self.downloads() or (self.is_own(key) and self.mode(key)):
            return False
        os.makedirs(parent(key), exist_ok=True)
        self.journal.share(key)
        if own is not None or self.journal.log.nearest(key) is not None:
            self.log.add("free", key)
        return True

    def _prepared(self, key: str) -> str:
        """Return the path at which to make ``key``."""
        self._check_may_change(parent(key))
        os.makedirs(self.upper + parent(key), exist_ok=True)
        if not self.is_own(key):
            clear(self.upper + key)  # folders that were needed for paths below a removed directory
        return self.upper + key

    def _check_is_directory(self, key: str) -> None:
        if not stat.S_ISDIR(self.read(key, os.stat).st_mode):
            _refuse(errno.ENOTDIR)

    def _check_may_change(self, directory: str) -> None:
        self._check_is_directory(directory)
        if not self.read(directory, lambda place: os.access(place, os.W_OK | os.X_OK)):
            _refuse(errno.EACCES)

    def _check_empty(self, key: str) -> None:
        if not stat.S_ISDIR(self.lstat(key).st_mode):
            _refuse(errno.ENOTDIR)
        if self.names(key):
            _refuse(errno.ENOTEMPTY)

    def _put(self, key: str, tree: bool = False) -> None:
        """Log that ``key`` is in the rank's own folder; with ``tree``, replace all entries below it."""
        own = self.log.nearest(key)
        if tree or own is None or own[1].kind != "put":
            self.log.add("put", key, over_tree=tree)

    def _drop(self, key: str, directory: bool = False) -> None:
        """Log that ``key`` is removed; its own file, if any, is gone already."""
        own, theirs = self.log.nearest(key), self.journal.log.nearest(key)
        inside = own is not None and own[0] != key and own[1].kind == "put"
        if directory or not inside or (theirs is not None and theirs[1].kind == "shared"):
            self.log.add("gone", key, over_tree=directory)

    def _whole(self, key: str) -> str:
        """Return the path of the rank's own copy of ``key``, a directory with its content."""
        if not stat.S_ISDIR(self.lstat(key).st_mode):
            return self.copied_up(key)
        if not self.is_own(key) or self._has_entries_below(key):
            partial = self._partial()
            self._copy_view(key, partial)
            os.makedirs(self.upper + parent(key), exist_ok=True)
            clear(self.upper + key)
            os.rename(partial, self.upper + key)
            self._put(key, tree=True)
        return self.upper + key

    def _copy_view(self, key: str, target: str) -> None:
        if not stat.S_ISDIR(self.mode(key)):
            self.read(key, lambda place: _copy_one(place, target))
            return
        os.mkdir(target)
        for child in self.names(key):
            self._copy_view(join(key, child), f"{target}/{child}")
        self.read(key, lambda place: shutil.copystat(place, target))

    def _has_entries_below(self, key: str) -> bool:
        below = key + "/"
        return any(at.startswith(below) for log in (self.log, self.journal.log) for at in log.entries)

    def _partial(self) -> str:
        return f"{self.folder}/partial.{os.getpid()}.{threading.get_ident()}"


def _refuse(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))  # OSError chooses the subclass for the number


def _move(source: str, target: str) -> None:
    if os.path.isdir(source) and os.path.isdir(target):
        os.rmdir(target)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.move(source, target)


def _copy_one(place: str, target: str) -> None:
    clear(target)  # remains of an earlier try
    if os.path.islink(place):
        os.symlink(os.readlink(place), target)
    elif os.path.isfile(place):
        copy(place, target)


def clear(path: str) -> None:
    """Remove ``path``, also a directory with its content, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        for child in os.listdir(path):
            clear(f"{path}/{child}")
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)
