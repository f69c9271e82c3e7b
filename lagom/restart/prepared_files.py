"""``prepare_files``: puts the files of a lost attempt into the state in which the next one is to find them.

See Note [Files of a lost attempt].
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from lagom.restart.disks import is_on_shared_disk, this_host
from lagom.restart.written_files import REWRITTEN, Identity, WrittenFiles, beside, identity_of


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
