"""``WrittenFiles``: what rank 0 has written in a run so far, as it tells the driver; the next attempt gets it.

``prepare_files`` puts the files of a lost attempt into the state in which the next one is to find them.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lagom.cluster import this_host

REWRITTEN = -1
"""In place of a length: the file was there when the run began, and the program itself has emptied it since."""
_MAX_SAVED = 20_000
"""Most saved files, and most removals and renamings, that are remembered."""
Identity = tuple[int, int, int]
"""Inode, time of the last change and length of a file: another version differs in one of them."""


@dataclass(slots=True)
class AppendedFile:
    """A file that grows, or that is changed in place."""

    begin: int | None
    """Bytes when the run began, or, after ``go_back``, at the snapshot; None if it was not there; or REWRITTEN."""
    in_place: bool = False
    """Whether the file is changed in place, so that its content at an earlier moment is unknown."""
    host: str = ""
    """Host on which rank 0 has written it, as ``this_host`` names it."""


@dataclass(frozen=True, slots=True)
class SavedVersion:
    """A complete version of a file, and how long the appended files were when it was complete."""

    identity: Identity
    lengths: Mapping[str, int]
    at: float
    host: str = ""
    """Host on which rank 0 has written it."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """A file or directory that was renamed."""

    path: str
    to: str
    replaces: bool
    """Whether another file had the name ``to``, which is lost."""
    host: str
    at: float


@dataclass(slots=True)
class WrittenFiles:
    """Files that rank 0 has written, made, renamed and removed in a run; paths are absolute, without links."""

    token: str = field(default_factory=lambda: secrets.token_hex(4))
    appended: dict[str, AppendedFile] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """Files that stay as the lost attempt left them: it has changed them in place, and they were there when the run
    began, or it has renamed them while they grew."""
    saved: dict[str, list[SavedVersion]] = field(default_factory=dict)
    """The last two versions of each file that was written whole."""
    writing: dict[str, tuple[str, Identity | None]] = field(default_factory=dict)
    """Files that are open, and not complete yet: the host of rank 0, and the version before, if there was one."""
    partial: dict[str, str] = field(default_factory=dict)
    """Folders of files that are being saved, with the host of rank 0."""
    made: set[str] = field(default_factory=set)
    """Directories that the run has made."""
    tracked: set[str] = field(default_factory=set)
    """Ids of runs that the program has begun in MLflow."""
    goes_on: bool = False
    """Whether content that was cut off is not to be put back: the present attempt has read a checkpoint, has saved a
    file while others grow, or began with a snapshot."""

    snapshot_at: float | None = None
    """Time of the snapshot from which the present attempt goes on; None without one."""

    renamed: list[Renaming] = field(default_factory=list)
    """Files and directories that the run has renamed: after ``go_back`` only those renamed since the snapshot."""
    gone: dict[str, float] = field(default_factory=dict)
    """Files and directories that the run has removed, with the time; after ``go_back`` as for ``renamed``."""

    before_snapshot: dict[str, AppendedFile] = field(default_factory=dict)
    """Entries of ``appended`` from before ``go_back`` replaced them."""

    @property
    def is_empty(self) -> bool:
        """Return whether no attempt has written anything yet."""
        return not (
            self.appended or self.changed or self.saved or self.writing or self.partial or self.made or self.tracked
        )

    def on_one_disk(self) -> bool:
        """Return whether a file that the run has written seems to be on a disk that hosts do not share."""
        folders = {os.path.dirname(path) for path in [*self.appended, *self.saved, *self.changed]}
        return not all(map(is_on_shared_disk, folders))

    def take(self, message: Mapping[str, Any]) -> None:
        """Apply a message of rank 0."""
        path, kind, at = message["path"], message["what"], message.get("told_at", time.time())
        if kind == "appends":
            self.appended.setdefault(path, AppendedFile(message["begin"], message["in_place"], message["host"]))
        elif kind == "changes":
            self.changed.add(path)
        elif kind == "writes":
            before = message["before"]
            self.writing[path] = message["host"], None if before is None else _identity(before)
        elif kind == "saved":
            self._save(path, message, at)
        elif kind == "renamed":
            self.renamed.append(Renaming(path, message["to"], message["replaces"], message["host"], at))
            del self.renamed[:-_MAX_SAVED]
        elif kind == "moved":
            self._move(path, message["to"])
        elif kind == "begins to save":
            self.partial[path] = message["host"]
        elif kind == "made":
            self.made.add(path)
        elif kind == "tracks":
            self.tracked.add(path)
        elif kind == "gone":
            self.gone[path] = at
            if len(self.gone) > _MAX_SAVED:
                del self.gone[next(iter(self.gone))]
            self.made.discard(path)
            self.partial.pop(path, None)
            self.writing.pop(path, None)
            self.saved.pop(path, None)
        elif kind == "resumed":
            self.goes_on = True

    def go_back(self, lengths: Mapping[str, int], at: float) -> None:
        """Have the next attempt find files as long as they were at a snapshot: ``lengths`` at the time ``at``."""
        self.snapshot_at, self.goes_on = at, True
        self.renamed = [one for one in self.renamed if one.at >= at]
        self.gone = {path: when for path, when in self.gone.items() if when >= at}
        self.gone |= {one.path: one.at for one in self.renamed if one.replaces}
        for path, length in (self._complete_lengths(at) | dict(lengths)).items():
            known = self.appended.get(path)
            if known is not None:
                self.before_snapshot.setdefault(path, known)
            self.writing.pop(path, None)
            self.appended[path] = AppendedFile(length, host=known.host if known is not None else this_host())

    def _complete_lengths(self, at: float) -> dict[str, int]:
        """Return the lengths of files that were written whole before the time ``at``, and appended to since."""
        found = {}
        for path, file in self.appended.items():
            versions = self.saved.get(path, ())
            if versions and versions[-1].at <= at and not file.in_place:
                found[path] = versions[-1].identity[2]
        return found

    def forget_snapshot(self) -> None:
        """Have the next attempt find files as they were when the run began."""
        self.appended |= self.before_snapshot
        self.before_snapshot, self.snapshot_at, self.goes_on = {}, None, True
        self.renamed, self.gone = [], {}

    def version(self, path: str, identity: Identity) -> SavedVersion | None:
        """Return the saved version of ``path`` with this ``identity``; None if there is none."""
        return next((one for one in self.saved.get(path, ()) if one.identity == identity), None)

    def siblings(self) -> Iterator[str]:
        """Yield the paths of all files that lagom may keep beside the program's files."""
        yield from (beside(path, self.token, "old") for path in self.writing)
        yield from (beside(path, self.token, "lost") for path in self.appended)

    def _save(self, path: str, message: Mapping[str, Any], at: float) -> None:
        self.writing.pop(path, None)
        version = SavedVersion(_identity(message["identity"]), message["lengths"], at, message["host"])
        self.saved[path] = [*self.saved.pop(path, [])[-1:], version]
        self.goes_on = self.goes_on or bool(version.lengths)
        for oldest in list(itertools.islice(self.saved, max(0, len(self.saved) - _MAX_SAVED))):
            del self.saved[oldest]

    def _move(self, path: str, to: str) -> None:
        """Move the facts about ``path``, and about all paths below it, to ``to``."""
        saved = {_moved(one, path, to): versions for one, versions in self.saved.items()}
        self.saved = saved
        self.made = {_moved(one, path, to) for one in self.made}
        self.appended = {_moved(one, path, to): file for one, file in self.appended.items()}


def partial_folder(path: str) -> str:
    """Return the folder in which this process saves ``path`` before it moves it to its place."""
    return f"{path}.{os.getpid()}.partial"


def beside(path: str, token: str, kind: str) -> str:
    """Return the path beside ``path`` at which lagom keeps another version of it: "old" or "lost"."""
    head, name = os.path.split(path)
    return f"{head}/.{name}.{token}.{kind}.lagom"


def is_sibling(name: str) -> bool:
    """Return whether ``name`` is that of a file which lagom keeps beside one of the program's."""
    return name.startswith(".") and name.endswith((".old.lagom", ".lost.lagom"))


def identity_of(status: os.stat_result) -> Identity:
    """Return the identity of a file."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def _identity(numbers: Sequence[int]) -> Identity:
    inode, changed, length = numbers
    return inode, changed, length


def _moved(one: str, path: str, to: str) -> str:
    return to + one[len(path) :] if one == path or one.startswith(path + "/") else one


# File systems that several hosts may share; all of FUSE are assumed to be.
_SHARED = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "gpfs", "beegfs", "fuse", "9p", "afs", "pvfs", "orangefs")


def is_on_shared_disk(path: str) -> bool:
    """Return whether the file system of ``path``, an absolute path without links, may be another host's as well."""
    kind, longest = "", -1
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            _, at, its_kind, *_ = line.split(" ")
            at = at.replace("\\040", " ").rstrip("/")
            if len(at) >= longest and (path + "/").startswith(at + "/"):
                kind, longest = its_kind, len(at)
    return kind.startswith(_SHARED)


def prepare_files(written: WrittenFiles) -> None:
    """Restore files that were being written, and cut appended files to their length when the run began.

    If the attempt goes on from a snapshot, cut them to their length at the snapshot, and undo renamings since. The
    longer file is kept beside each file that is cut, for an attempt that goes on from a checkpoint.
    """
    remove_partial(written)
    for one in reversed(written.renamed if written.snapshot_at is not None else ()):
        with suppress(OSError):
            if not one.replaces and is_here(one.path, one.host) and not os.path.lexists(one.path):
                os.rename(one.to, one.path)
    for path, (host, before) in written.writing.items():
        with suppress(OSError):
            if is_here(path, host):
                _restore(path, beside(path, written.token, "old"), before)
    for path, file in written.appended.items():
        with suppress(OSError):
            if is_here(path, file.host):
                _cut(path, beside(path, written.token, "lost"), file.begin, renew=written.goes_on)


def put_back(written: WrittenFiles) -> None:
    """Put back the files as they were before they were cut, unless ``written.goes_on``."""
    for path in written.appended:
        with suppress(OSError):
            if not written.goes_on:
                os.replace(beside(path, written.token, "lost"), path)


def remove_partial(written: WrittenFiles) -> None:
    """Remove the folders of files that a lost attempt was saving."""
    for path, host in written.partial.items():
        if is_here(path, host):
            shutil.rmtree(path, ignore_errors=True)


def remove_siblings(written: WrittenFiles) -> None:
    """Remove all that lagom keeps beside the program's files, and files that are half saved."""
    remove_partial(written)
    for path in written.siblings():
        with suppress(OSError):
            os.unlink(path)


def is_here(path: str, host: str) -> bool:
    """Return whether ``path`` names the same file on this host as on ``host``."""
    return host == this_host() or is_on_shared_disk(path)


def _restore(path: str, old: str, before: Identity | None) -> None:
    """Put ``old`` back as ``path``; without ``old``, remove ``path`` unless it still is the version ``before``."""
    if os.path.lexists(old):
        os.replace(old, path)
    elif identity_of(os.stat(path)) != before:
        os.unlink(path)


def _cut(path: str, lost: str, begin: int | None, renew: bool) -> None:
    """Move ``path`` to ``lost``, and give ``path`` the first ``begin`` bytes again.

    If ``begin`` is None, ``path`` is not made again; if it is REWRITTEN, ``path`` stays and is copied to ``lost``. An
    existing ``lost`` is replaced only with ``renew``.
    """
    if not os.path.lexists(path):
        return
    if begin == REWRITTEN:  # the program empties it again, or goes on from a checkpoint
        if renew or not os.path.lexists(lost):
            shutil.copy2(path, lost)
        return
    if renew or not os.path.lexists(lost):
        os.replace(path, lost)  # a new file in its place: a rank that is cut off may still have the former open
    else:
        os.unlink(path)
    if begin is not None:
        with open(lost, "rb") as source, open(path, "wb") as target:
            left = begin
            while left > 0 and (data := source.read(min(left, 1 << 20))):
                target.write(data)
                left -= len(data)
        shutil.copymode(lost, path)


# Note [Files of a lost attempt]
# A new attempt finds the disk as a process does that is started again by hand after a kill, except that
#
# - a file that was being written is as it was before: a loss during a write is a loss just before it. So the attempt
#   finds a disk that a kill between two operations on files could have left. (Half a file would be an error of the
#   program's; no file would lose the checkpoint before.) torch.save and safetensors write whole files in any case, the
#   former in a folder beside, which is removed after a loss; for `open(path, "w")` the version before stays beside the
#   file until it is closed.
# - files that are appended to are as long as they were when the run began. If the program then reads a file that a lost
#   attempt has saved, the program goes on from there: the appended files get back the length that they had when that
#   file was saved. Lines that the new attempt has appended before follow, unless they repeat the lines that were there.
# - `mkdir` and exclusive creation succeed once for what a lost attempt has made.
# - after a snapshot, what was renamed since has its name of then, unless it has replaced another file; and what was
#   removed since, or has replaced another file, can be removed or renamed once more.
#
# Rank 0 tells the driver before each of these changes, and the driver tells the host of the next rank 0, which need not
# be the same. That host prepares the files before any rank begins: those that were written there, and those on file
# systems that hosts share; the same path on another disk is another file.
