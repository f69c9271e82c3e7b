"""``Overlay``: keeps the file changes of a rank that does not use the real disk in a folder of the rank's own."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from lagom.disk.journal import copy
from lagom.disk.view import View

_UNNAMED = getattr(os, "O_TMPFILE", os.O_DIRECTORY)


class Overlay(View):
    """Makes a rank's file changes in the rank's own folder; a file is copied there before its first change.

    ``key`` is the absolute path by which the program knows a file (see ``view.py``). A method with the name of a
    function of ``os`` has the same effect on the rank's view of the disk, and raises the same errors; the caller puts
    the program's file names into these. The base class ``View`` finds the place where a file is read.
    """

    def open(self, key: str, flags: int, mode: int) -> int:
        """Open as ``os.open``; the caller has resolved links in ``key`` as far as ``flags`` allow."""
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and flags & _UNNAMED != _UNNAMED
        if not writes or self.goes_real(key):
            return self.read(key, lambda place: os.open(place, flags, mode), os.close)
        found = self.mode(key)
        if flags & os.O_CREAT and (not found or flags & os.O_EXCL):
            return int(self.make(key, lambda place: os.open(place, flags, mode)))
        if not stat.S_ISREG(found) or self.is_own(key):
            # A pipe or a device of the real disk is opened itself, and so is the rank's own file; the system refuses to
            # open a directory for writing.
            return self.read(key, lambda place: os.open(place, flags & ~os.O_CREAT, mode), os.close)
        if not self.read(key, lambda place: os.access(place, os.W_OK)):
            _refuse(errno.EACCES)
        return os.open(self.copied_up(key, keep_content=not flags & os.O_TRUNC), flags, mode)

    def make(self, key: str, call: Callable[[str], Any]) -> Any:
        """Make a file, directory or link at ``key``; ``call`` makes it at the place that it is given."""
        if self.goes_real(key):
            return call(key)
        if self.mode(key):
            _refuse(errno.EEXIST)
        result = call(self._prepared(key))
        self._put(key)
        return result

    def symlink(self, target: str | bytes, key: str) -> None:
        """Make a link as ``os.symlink``; ``target`` stays as the program gave it."""
        self.make(key, lambda place: os.symlink(os.fsdecode(target), place))

    def link(self, source: str, key: str) -> None:
        """Make a hard link as ``os.link``."""
        mode = self.lstat(source).st_mode

        def link(place: str) -> None:
            if stat.S_ISDIR(mode):
                _refuse(errno.EPERM)
            os.link(self.place(source) if place == key else self.copied_up(source), place)

        self.make(key, link)

    def change(self, key: str, call: Callable[[str], Any]) -> Any:
        """Change mode, times or content of ``key``: call ``call`` with the path of this rank's copy.

        If this rank writes ``key`` for real, ``call`` gets ``key`` itself. A directory that is not in the rank's folder
        is left to rank 0, which changes the real one.
        """
        if self.goes_real(key):
            return call(key)
        if stat.S_ISDIR(self.lstat(key).st_mode) and not self.is_own(key):
            return None
        return call(self.copied_up(key))

    def truncate(self, key: str, call: Callable[[str], Any]) -> Any:
        """Truncate as ``os.truncate``."""
        if stat.S_ISDIR(self.mode(key)):
            _refuse(errno.EISDIR)
        return self.change(key, call)

    def unlink(self, key: str, call: Callable[[str], Any]) -> None:
        """Remove a file as ``os.unlink``."""
        if self.goes_real(key):
            call(key)
            return
        if stat.S_ISDIR(self.lstat(key).st_mode):
            _refuse(errno.EISDIR)
        self._check_may_change(os.path.dirname(key))
        if self.is_own(key):
            os.unlink(self.upper + key)
        self._drop(key)

    def rmdir(self, key: str, call: Callable[[str], Any]) -> None:
        """Remove a directory as ``os.rmdir``."""
        if self.goes_real(key):
            call(key)
            return
        self._check_empty(key)
        self._check_may_change(os.path.dirname(key))
        clear(self.upper + key)
        self.log.add("gone", key, over_tree=True)

    def rename(self, key: str, to: str) -> None:
        """Rename as ``os.rename`` and ``os.replace``."""
        from_real, to_real = self.goes_real(key), self.goes_real(to)
        if from_real and to_real:
            os.rename(key, to)
            return
        for directory in (os.path.dirname(key), os.path.dirname(to)):
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
        self._check_may_change(os.path.dirname(key))
        if whole:
            self._rename_tree(key, to)
            return
        move(key if from_real else self.copied_up(key), to if to_real else self._prepared(to))
        if not to_real:
            self._put(to)
        if not from_real:
            self._drop(key)

    def _rename_tree(self, key: str, to: str) -> None:
        """Rename a directory entry by entry: some entries are in the rank's folder, others on the real disk."""
        if self.mode(to):
            self.rmdir(to, os.rmdir)
        self.make(to, os.mkdir)
        for child in self.names(key):
            self.rename(os.path.join(key, child), os.path.join(to, child))
        self.read(key, lambda place: shutil.copystat(place, self.place(to)))
        self.rmdir(key, os.rmdir)

    def copied_up(self, key: str, keep_content: bool = True) -> str:
        """Return the path of the rank's own copy of the file or link ``key``; make the copy if there is none.

        A file that is copied is empty unless ``keep_content``.
        """
        mode = self.lstat(key).st_mode
        if self.is_own(key):
            return self.upper + key
        os.makedirs(self.upper + os.path.dirname(key), exist_ok=True)
        partial = f"{self.folder}/partial.{os.getpid()}.{threading.get_ident()}"
        if stat.S_ISLNK(mode):
            os.symlink(self.read(key, os.readlink), partial)
        elif not stat.S_ISREG(mode):
            os.mknod(partial, mode)  # opening a pipe would wait for its writer
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
        os.makedirs(os.path.dirname(key), exist_ok=True)
        self.journal.share(key)
        if own is not None or self.journal.log.nearest(key) is not None:
            self.log.add("free", key)
        return True

    def _prepared(self, key: str) -> str:
        """Return the path at which to make ``key`` in the rank's folder, after a check of its directory."""
        self._check_may_change(os.path.dirname(key))
        os.makedirs(self.upper + os.path.dirname(key), exist_ok=True)
        if not self.is_own(key):
            clear(self.upper + key)  # a removed directory may have left empty folders here
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

    def _put(self, key: str) -> None:
        """Log that ``key`` is in the rank's own folder."""
        own = self.log.nearest(key)
        if own is None or own[1].kind != "put":
            self.log.add("put", key)

    def _drop(self, key: str) -> None:
        """Log that the file ``key`` is removed; the caller has removed the rank's own copy, if there was one."""
        own, theirs = self.log.nearest(key), self.journal.log.nearest(key)
        inside = own is not None and own[0] != key and own[1].kind == "put"
        if not inside or (theirs is not None and theirs[1].kind == "shared"):
            self.log.add("gone", key)


def _refuse(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))  # OSError chooses the subclass for the number


def copy_disk(folder: str, target: str) -> None:
    """Copy the files and the log of an overlay to another folder, in place of earlier files there."""
    clear(f"{target}/files")
    os.makedirs(target, mode=0o700, exist_ok=True)
    shutil.copytree(f"{folder}/files", f"{target}/files", symlinks=True, copy_function=_copy_file)
    copy(f"{folder}/log", f"{target}/log")


def _copy_file(source: str, target: str) -> None:
    mode = os.lstat(source).st_mode
    if stat.S_ISREG(mode):
        copy(source, target)
    else:
        os.mknod(target, mode)  # a pipe or a socket


def move(source: str, target: str) -> None:
    """Rename a file or link, also to another file system."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        clear(target)
        shutil.move(source, target)


def clear(path: str, kept: Collection[str] = ()) -> None:
    """Remove ``path``, also a directory with its content, if it exists; ``kept`` paths and their directories stay."""
    if path in kept:
        return
    if os.path.isdir(path) and not os.path.islink(path):
        for child in os.listdir(path):
            clear(f"{path}/{child}", kept)
        if not os.listdir(path):
            os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)
