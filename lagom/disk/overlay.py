"""``Overlay``: keeps the file changes of a rank that does not use the real disk in a folder of the rank's own.

Its base class ``View`` finds files: the rank sees the disk at the run's start plus its own changes. A ``key`` is an
absolute path by which the program knows a file; only its last part may be a symbolic link. A ``place`` is the path at
which the file is in fact. See Note [A disk of each rank's own] in install.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeVar

from lagom.disk.journal import Journal, PathLog, copy
from lagom.restart.written_files import is_sibling

T = TypeVar("T")

_MAX_LINKS = 40  # links that a path may follow, as in Linux


class View:
    """Finds the place of a file: in the rank's folder (``upper``), put aside by rank 0, or at the key."""

    def __init__(
        self, folder: str, journal: Journal, left_alone: Callable[[str], bool], downloads: Callable[[], bool]
    ) -> None:
        """Keep the rank's files and log in ``folder``.

        Args:
            left_alone: returns whether a key is on the real disk for every rank.
            downloads: returns whether this thread downloads, so that its files go to the real disk.
        """
        self.upper = folder + "/files"
        os.makedirs(self.upper, mode=0o700, exist_ok=True)
        self.log = PathLog(folder + "/log")
        self.journal = journal
        self.left_alone = left_alone
        self.downloads = downloads
        self.folder = folder
        self._nowhere = folder + "/nothing"
        self._listings: list[str] = []
        self._directories: dict[str, str] = {}
        """Keys of directories, by the program's path."""
        self._state = (0, 0)

    def close(self) -> None:
        """Close the rank's log."""
        self.log.close()

    def _refresh(self) -> None:
        self.log.fresh()
        self.journal.log.fresh()
        state = (self.log.num_read, self.journal.log.num_read)
        if state != self._state:
            self._directories = {}  # a new dict, since another thread may be using the old one
            self._state = state

    # Where things are

    def key(self, path: str, follow: bool) -> str:
        """Return the key of an absolute path; with ``follow``, and if the path is a link, the key of its target."""
        self._refresh()
        head, _, tail = path.rpartition("/")
        if tail in ("", ".", ".."):
            return self._resolved(path)
        directories = self._directories
        directory = directories.get(head)
        if directory is None:
            directory = directories[head] = self._resolved(head)
        key = f"/{tail}" if directory == "/" else f"{directory}/{tail}"
        return self._resolved(key) if follow and self._link(key) is not None else key

    def _resolved(self, path: str) -> str:
        done, todo, num_links = "/", path.split("/")[::-1], 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = os.path.dirname(done)
                continue
            key = f"/{part}" if done == "/" else f"{done}/{part}"
            link = self._link(key)
            if link is None:
                done = key
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            done = "/" if link.startswith("/") else done
            todo += link.split("/")[::-1]
        return done

    def _link(self, key: str) -> str | None:
        try:
            return self.read(key, os.readlink)
        except OSError:
            return None

    def place(self, key: str) -> str:
        """Return the path where this rank reads ``key`` now; a path that never exists if the rank must see no file."""
        if self.left_alone(key):
            return key
        own = self.log.nearest(key)
        if own is None:
            return self.journal.lower(key) or self._nowhere + key
        at, entry = own
        if entry.kind == "free":
            return key
        if entry.kind == "put":
            if self._is_shared_below(key, at):
                return key
            return self.upper + key
        return self._nowhere + key

    def _is_shared_below(self, key: str, at: str) -> bool:
        """Return whether ``key``, below the directory ``at`` of this rank's folder, is a download of rank 0."""
        found = self.journal.log.nearest(key)
        if found is None or found[1].kind != "shared" or len(found[0]) < len(at):
            return False
        return not os.path.lexists(self.upper + key)

    def is_own(self, key: str) -> bool:
        """Return whether the place of ``key`` is in the rank's own folder, also if no file is there."""
        return self.place(key).startswith(self.upper + "/")

    def seen(self, place: str) -> str:
        """Return the path by which the program knows ``place``."""
        if not place.startswith(os.path.dirname(self.folder) + "/"):
            return place
        for inner in (self.upper, self._nowhere, *self._listings):
            if place == inner or place.startswith(inner + "/"):
                return place[len(inner) :] or "/"
        for key, entry in self.journal.log.entries.items():
            if entry.kind == "aside" and (place == entry.other or place.startswith(entry.other + "/")):
                return key + place[len(entry.other) :]
        return place

    # Reading

    def read(self, key: str, call: Callable[[str], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """Return the result of ``call`` with the place of ``key``; call again if the place has changed meanwhile.

        ``undo`` takes the result of a call that is repeated.
        """
        theirs = self.journal.log
        while True:
            num_read, place = theirs.num_read, self.place(key)
            try:
                result = call(place)
            except OSError:
                theirs.fresh()
                if theirs.num_read != num_read and self.place(key) != place:
                    continue
                raise
            theirs.fresh()
            if theirs.num_read == num_read or self.place(key) == place:
                return result
            undo(result)

    def is_untouched(self, path: str) -> bool:
        """Return whether the directory at the absolute ``path`` on the real disk is the one that the rank sees."""
        key = self.key(path + "/", follow=True)
        touched = self.log.touches(key) or self.journal.log.touches(key)
        # On the real disk the links in the path may lead elsewhere.
        return not touched and self.place(key) == key == os.path.realpath(path)

    def lstat(self, key: str) -> os.stat_result:
        """Return the status of ``key`` itself."""
        return self.read(key, os.lstat)

    def mode(self, key: str) -> int:
        """Return type and permissions of ``key``; 0 if it does not exist."""
        try:
            return self.lstat(key).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def names(self, key: str) -> list[str]:
        """Return the names in the directory ``key``, sorted; see Note [Order of a directory] in install.py."""

        def look(place: str) -> list[str]:
            found = {name for name in os.listdir(place) if not is_sibling(name)}
            self.journal.log.fresh()  # A record precedes its change, so every new name seen above is recorded by now.
            in_doubt = self.log.children.get(key, set()) | self.journal.log.children.get(key, set())
            return sorted(
                child for child in found | in_doubt if child not in in_doubt or self.mode(os.path.join(key, child))
            )

        return self.read(key, look)

    def listed(self, key: str) -> str:
        """Return a directory for C code to list in place of ``key``.

        It is the place of ``key`` if its names are those that the rank sees; otherwise a new folder with these names.
        """
        place, names = self.place(key), self.names(key)
        if set(os.listdir(place)) == set(names):
            return place
        entries = [(name, self.mode(os.path.join(key, name)), self.place(os.path.join(key, name))) for name in names]
        top = f"{self.folder}/listing.{os.getpid()}.{zlib.crc32(repr((key, entries)).encode()):x}"
        if not os.path.isdir(top):
            self._list(f"{top}.{threading.get_ident()}", key, entries)
            with contextlib.suppress(OSError):  # another thread was first
                os.rename(f"{top}.{threading.get_ident()}", top)
            self._listings.append(top)
        return top + key

    def _list(self, top: str, key: str, entries: Sequence[tuple[str, int, str]]) -> None:
        os.makedirs(top + key)
        for name, mode, place in entries:
            if stat.S_ISDIR(mode):
                os.mkdir(f"{top}{key}/{name}")
            elif mode:
                os.symlink(place, f"{top}{key}/{name}")


_UNNAMED = getattr(os, "O_TMPFILE", os.O_DIRECTORY)


class Overlay(View):
    """Makes a rank's file changes in the rank's own folder; a file is copied there before its first change.

    ``key`` is the absolute path by which the program knows a file (see ``overlay.py``). A method with the name of a
    function of ``os`` has the same effect on the rank's view of the disk, and raises the same errors; the caller puts
    the program's file names into these. The base class ``View`` finds the place where a file is read.
    """

    def open(self, key: str, flags: int, mode: int) -> int:
        """Open as ``os.open``; the caller has resolved links in ``key`` as far as ``flags`` allow."""
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and flags & _UNNAMED != _UNNAMED
        if not writes or self.goes_real(key):
            return self.read(key, lambda place: os.open(place, flags, mode), os.close)
        entry_mode = self.mode(key)
        if flags & os.O_CREAT and (not entry_mode or flags & os.O_EXCL):
            return int(self.make(key, lambda place: os.open(place, flags, mode)))
        if not stat.S_ISREG(entry_mode) or self.is_own(key):
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
