"""``own_disk``: patches the functions of files, so that a rank's program sees the files that one process would see.

A rank other than rank 0 writes to an overlay of its own over the disk.
"""

from __future__ import annotations

import _io
import builtins
import bz2
import functools
import glob
import io
import os
import pathlib
import posix
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lagom.disk.attempt_calls import ProtectedFirstRank, RestoringRank
from lagom.disk.first_rank import FirstRankCalls, NoJournal
from lagom.disk.journal import Journal
from lagom.disk.libraries import interpose_libraries
from lagom.disk.other_ranks import OtherRankCalls
from lagom.disk.overlay import copy_disk
from lagom.disk.programs import warn_of_programs
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lagom.disk.calls import FileCalls
    from lagom.disk.write_notes import Tell
    from lagom.restart.written_files import WrittenFiles

_calls: FileCalls | None = None
"""The file functions of this process, while it is a rank with its own disk, or was forked from such a rank."""


@contextmanager
def own_disk(
    host_dir: str,
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    lands: bool = True,
    written: WrittenFiles | None = None,
    tell: Tell = lambda _: None,
    begins: str | None = None,
) -> Iterator[None]:
    """Patch file functions so that the program sees the disk as one process would.

    Nothing is patched for a single rank with ``lands=True`` and ``written=None``. See Note [A disk of each rank's own].

    Args:
        host_dir: a folder that the ranks of the host share; later ``settle`` moves files from it to the real disk.
        lands: whether rank 0 uses the real disk; otherwise (in a search, a rehearsal) it has an overlay too.
        written: the files that earlier attempts of the run have written; None if the run cannot begin again.
        tell: called with changes of rank 0, if it uses the real disk and ``written`` is not None.
        begins: a folder that ``keep_disk`` has made, with whose files an overlay begins; None for an empty overlay.
    """
    global _calls  # the one disk of this process
    if lands and world_size == 1 and written is None:
        yield
        return
    tempfile.gettempdir()  # tempfile chooses its default folder by a write to it, which must reach the real disk
    folder = os.path.realpath(host_dir) + "/disk"
    with ExitStack() as stack:
        journal = Journal(folder) if world_size > 1 or not lands else NoJournal()
        stack.callback(journal.close)
        calls: FileCalls
        by_name = local_world_size < world_size
        if rank == 0 and lands and written is not None:
            calls = ProtectedFirstRank(host_dir, by_name, journal, written, tell)
        elif rank == 0 and lands:
            calls = FirstRankCalls(host_dir, by_name, journal)
        else:
            own = f"{folder}/{rank}"
            os.makedirs(own, mode=0o700, exist_ok=True)
            if begins is not None:
                copy_disk(begins, own)
            if written is not None and not written.is_empty:
                calls = RestoringRank(host_dir, by_name, journal, own, written)
            else:
                calls = OtherRankCalls(host_dir, by_name, journal, own)
            stack.callback(calls.overlay.close)
        for owner, name, value in _installed(calls):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(interpose_libraries(calls, reads=isinstance(calls, OtherRankCalls)))
        if isinstance(calls, FirstRankCalls) and world_size > 1:
            stack.enter_context(warn_of_programs(lambda: calls.was_asked or calls.is_over))
        before, _calls = _calls, calls
        try:
            yield
        finally:
            _calls = before


def asked_for_rank() -> None:
    """Note that the program knows which rank it is, so that files that only one rank writes are intentional."""
    if _calls is not None:
        _calls.asked()


def has_asked() -> bool:
    """Return whether this is a rank with an overlay whose program knows which rank it is."""
    return isinstance(_calls, OtherRankCalls) and _calls.was_asked


def knows_rank() -> bool:
    """Return whether the program knows which rank it is."""
    return _calls is not None and _calls.was_asked


def reports_changes() -> bool:
    """Return whether ``report_changes`` has an effect in this process."""
    return isinstance(_calls, FirstRankCalls) and not _calls.is_over


def report_changes(told: Callable[[str], None]) -> None:
    """On rank 0, call ``told`` from now on with each path that this process is about to change.

    See ``FirstRankCalls.on_change`` for the changes that count.
    """
    if isinstance(_calls, FirstRankCalls):
        _calls.on_change = told


def keep_disk(folder: str) -> None:
    """Copy this rank's overlay, if it has one, to ``folder``, in place of an earlier copy."""
    if isinstance(_calls, OtherRankCalls):
        _calls.keep(folder)


def reach_disk(folder: str) -> None:
    """Let this process read and change the real ``folder`` from now on, also if it has an overlay."""
    if _calls is not None:
        _calls.free(folder)


def share_disk() -> None:
    """Let the program use the real disk from now on: a distributed program decides itself which rank writes."""
    if _calls is not None:
        _calls.is_over = True


def downloading() -> AbstractContextManager[None]:
    """Write the files of the block to the real disk, where all ranks of the host see them."""
    return nullcontext() if _calls is None else _calls.downloading()


@contextmanager
def on_real_disk() -> Iterator[None]:
    """Let this thread read the real disk in the block, also if the rank has an overlay."""
    if _calls is None:
        yield
        return
    before, _calls.own.inside = _calls.own.inside, True
    try:
        yield
    finally:
        _calls.own.inside = before


def path_to_write(path: str) -> str:
    """Return the place where C code must write the file that the program calls ``path``.

    Raises:
        OSError: if a rank with an overlay cannot write the file.
    """
    if _calls is None:
        return path
    return _calls.path_to_write(path)


def path_to_read(path: str) -> str:
    """Return the place where C code must read the file that the program calls ``path``."""
    return path if _calls is None else _calls.path_to_read(path)


def is_protected() -> bool:
    """Return whether this is rank 0 of a run that may begin again after a loss, whose file changes are noted."""
    return isinstance(_calls, ProtectedFirstRank)


def growing_lengths() -> dict[str, int]:
    """Flush the files that the program goes on writing, and return their lengths in bytes, by path.

    The result is empty unless ``is_protected``.
    """
    return _calls.notes.lengths() if isinstance(_calls, ProtectedFirstRank) else {}


def flush_at_save(stream: Any) -> None:
    """Flush ``stream`` from now on whenever the program saves a file, so that the two fit together after a loss."""
    if isinstance(_calls, ProtectedFirstRank):
        _calls.notes.streams.add(stream)


def note_tracked_run(run_id: str) -> None:
    """Note that the program has begun a tracker's run (MLflow); a new attempt gets it by ``lost_tracked_runs``."""
    if isinstance(_calls, ProtectedFirstRank):
        _calls.notes.tell("tracks", run_id)


def lost_tracked_runs() -> set[str]:
    """Return the ids of the trackers' runs that lost attempts have begun, and forget them; empty after a snapshot."""
    return _calls.take_tracked() if isinstance(_calls, ProtectedFirstRank) else set()


def finish_writes() -> None:
    """Remove what lagom kept for a new attempt beside files of the program; call this when the program has ended."""
    if isinstance(_calls, ProtectedFirstRank):
        _calls.finish()


def writes_for_real() -> bool:
    """Return whether this process has no overlay, so that it always writes to the real disk."""
    return not isinstance(_calls, OtherRankCalls)


def _installed(calls: FileCalls) -> Iterator[tuple[object, str, Any]]:
    """Yield the replacements: owner, name, new function."""
    new = calls.replacements()
    opened = new.pop("io.open")
    for owner in (builtins, io, _io):
        yield owner, "open", opened
    # These modules copied the function under a name of their own when they were imported.
    yield tarfile, "bltn_open", opened
    yield bz2, "_builtin_open", opened
    for name, call in new.items():
        for module in (os, posix):
            yield module, name, call
    yield from _abilities(calls, new)
    yield from _kept_in_classes(calls, new | {"open": opened})
    if isinstance(calls, OtherRankCalls):
        # Let rmtree use paths, not descriptors: rank 0 may put a directory aside between two calls of rmtree, which
        # would then refuse to go on, since it takes the replaced directory for an attack.
        yield shutil, "_use_fd_functions", False
    for name in ("_mkstemp_inner", "mkdtemp"):
        yield tempfile, name, calls.named_temporarily(vars(tempfile)[name])
    closer = vars(tempfile)["_TemporaryFileCloser"]
    name = "cleanup" if hasattr(closer, "cleanup") else "close"
    # The default of the parameter ``unlink`` is the original ``os.unlink``.
    yield closer, name, functools.partialmethod(vars(closer)[name], unlink=new["unlink"])


def _abilities(calls: FileCalls, new: dict[str, Any]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield ``os.supports_fd`` and similar sets of functions, with the replacements added."""
    for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids"):
        able = getattr(os, name)
        yield os, name, able | {call for other, call in new.items() if calls.original[other] in able}


def _kept_in_classes(calls: FileCalls, new: dict[str, Any]) -> Iterator[tuple[object, str, Any]]:
    """Yield attributes of classes of pathlib (Python 3.10) and glob (from 3.13) that hold the original functions."""
    known = {id(original): name for name, original in calls.original.items() if name != "open"}
    known[id(calls.original["io.open"])] = "open"
    classes = {value for module in (pathlib, glob) for value in vars(module).values() if isinstance(value, type)}
    for owner in sorted(classes, key=lambda owner: owner.__qualname__):
        for attribute, value in list(vars(owner).items()):
            name = known.get(id(getattr(value, "__func__", value)))
            if name in new:
                yield owner, attribute, staticmethod(new[name])


# Note [A disk of each rank's own]
# All ranks run the same program, and all of them write the same files. So that each rank sees the files of one process,
# every rank has its own disk. The rank reads back what it writes, does not see files that it has removed, and makes a
# directory by `os.mkdir` without an error; no rank waits for another. Rank 0's disk is the real disk, except in a
# search or a rehearsal, where rank 0 is as any other rank. The changes of another rank go to a folder of the run
# (Overlay), which its reads prefer to the real disk; a log lists the paths that are in the folder and the paths that
# are removed.
#
# Ranks are not equally fast: rank 0 may have made "out" before another rank asks whether "out" exists. So before its
# first change of a path's name or content, rank 0 records the state of the path or puts the file aside (Journal), and
# the other ranks look at these records before they look at the real disk. Changes of mode, times or attributes are not
# recorded, nor are pipes and devices that were there before. Rank 0 writes the record first and changes the path then.
# A reader looks for records before and after it reads (View.read), so it sees either the disk without the change, or
# the record.
#
# This state is in files and not in memory, so that loader workers, which are forked from a rank, see and change the
# same disk as the rank.
#
# All ranks use the real disk for some paths: devices, /proc, the caches of torch and of hubs, __pycache__, files that
# tempfile makes in its default folder (each rank has other names, and programs often hand them to other programs), and
# downloads, which the first rank of a host does for all. C code that opens paths (h5py, pyarrow, sqlite, cv2) calls the
# same functions; see Note [Files of C code] in libraries.py. Other programs and `io.FileIO` use the real disk on every
# rank. Ranks on another host that share a file system (NFS) with rank 0's host write to overlays, but see the changes
# that rank 0 makes there during the run, since they do not see its journal.

# Note [Order of a directory]
# The file system decides the order of os.listdir, but a data set of the files of a directory must have the same order
# on all ranks. So lagom sorts names if the file systems of two ranks may list a directory in different orders: if the
# program has changed the directory, or if the ranks are on several hosts.
