"""``own_disk``: gives every rank the view of one process with its own disk; rank 0 has the real one."""

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

from lagom.files.attempt_calls import ProtectedFirstRank, RestoringRank
from lagom.files.first_rank import FirstRankCalls, NoJournal
from lagom.files.journal import Journal
from lagom.files.libraries import interpose_libraries
from lagom.files.other_ranks import OtherRankCalls
from lagom.files.overlay import copy_disk
from lagom.files.programs import warn_of_programs
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lagom.files.calls import FileCalls
    from lagom.files.write_notes import Tell
    from lagom.restart.written_files import WrittenFiles

_calls: FileCalls | None = None
"""The calls of this process, while it is a rank with its own disk, or was forked from one."""


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
    notices: bool = False,
    begins: str | None = None,
) -> Iterator[None]:
    """Have the program see the disk as one process would. See Note [A disk of each rank's own].

    The ranks of the host share ``host_dir``; afterwards ``settle`` moves remaining files from there to the real disk.
    Without ``lands`` no rank uses the real disk: rank 0 has its own one too. ``written`` is what earlier attempts of
    the run have written, None if it begins only once; then rank 0 calls ``tell`` with its own changes. With ``notices``
    each rank hears of its changes by ``notice_changes``. ``begins`` is a folder that ``keep_disk`` has made: a disk of
    the rank's own begins with its files.
    """
    global _calls  # the one disk of this process
    if lands and world_size == 1 and written is None:
        yield
        return
    tempfile.gettempdir()  # tempfile finds its folder by writing there
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
        for owner, name, value in _installed(calls, notices):
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
    """Note that the program knows which rank it is: files that it writes under names of their own are intentional."""
    if _calls is not None:
        _calls.asked()


def has_asked() -> bool:
    """Return whether the program of this rank, not the first, knows which rank it is."""
    return isinstance(_calls, OtherRankCalls) and _calls.was_asked


def knows_rank() -> bool:
    """Return whether the program knows which rank it is."""
    return _calls is not None and _calls.was_asked


def reports_changes() -> bool:
    """Return whether ``report_changes`` hears of the changes of files in this process."""
    return isinstance(_calls, FirstRankCalls) and not _calls.is_over


def report_changes(told: Callable[[str], None]) -> None:
    """Call ``told`` from now on with each path that this process is about to change, unless ranks leave it alone."""
    if isinstance(_calls, FirstRankCalls):
        _calls.on_change = told


def keep_disk(folder: str) -> None:
    """Copy what the program has changed on the rank's own disk to ``folder``, in place of an earlier copy."""
    if isinstance(_calls, OtherRankCalls):
        _calls.keep(folder)


def reach_disk(folder: str) -> None:
    """Have this process find and change the real ``folder``, whatever disk of its own it has."""
    if _calls is not None:
        _calls.free(folder)


def share_disk() -> None:
    """Let the program see the real disk from now on: it is a distributed program and says which rank writes."""
    if _calls is not None:
        _calls.is_over = True


def downloading() -> AbstractContextManager[None]:
    """Let files that are written in the block be real, and visible to all ranks of the host."""
    return nullcontext() if _calls is None else _calls.downloading()


def path_to_write(path: str) -> str:
    """Return the place where C code must write the file that the program calls ``path``."""
    if _calls is None:
        return path
    _calls.changes.rewrites()
    return _calls.path_to_write(path)


def path_to_read(path: str) -> str:
    """Return the place where C code must read the file that the program calls ``path``."""
    return path if _calls is None else _calls.path_to_read(path)


def is_protected() -> bool:
    """Return whether a new attempt finds the files of this rank as a checkpoint needs them."""
    return isinstance(_calls, ProtectedFirstRank)


def growing_lengths() -> dict[str, int]:
    """Return the lengths of files that the program goes on writing, after what it holds back has been written out."""
    return _calls.notes.lengths() if isinstance(_calls, ProtectedFirstRank) else {}


def flush_at_save(stream: Any) -> None:
    """Have ``stream`` flushed whenever the program has saved a file: it goes on with it after a loss of the run."""
    if isinstance(_calls, ProtectedFirstRank):
        _calls.notes.streams.add(stream)


def note_tracked_run(run_id: str) -> None:
    """Note that the program has begun a run of a tracker's, which an attempt after a loss does not go on with."""
    if isinstance(_calls, ProtectedFirstRank):
        _calls.notes.tell("tracks", run_id)


def lost_tracked_runs() -> set[str]:
    """Return the runs that lost attempts have begun; once."""
    return _calls.take_tracked() if isinstance(_calls, ProtectedFirstRank) else set()


def finish_writes() -> None:
    """Remove what is kept for a new attempt beside files of the program, which has ended."""
    if isinstance(_calls, ProtectedFirstRank):
        _calls.finish()


def writes_for_real() -> bool:
    """Return whether files that this process writes are on the real disk, as a rule."""
    return not isinstance(_calls, OtherRankCalls)


def notice_changes(rewrites: Callable[[], None], appends: Callable[[str, bool], None]) -> None:
    """Call ``rewrites`` before the program changes the disk from now on, or ``appends`` when it has begun to append.

    See ``FileChanges`` in restart/file_changes.py.
    """
    if _calls is not None:
        _calls.changes.rewrites, _calls.changes.appends = rewrites, appends


def _installed(calls: FileCalls, notices: bool) -> Iterator[tuple[object, str, Any]]:
    """Yield the replacements: owner, name, new function."""
    new = calls.replacements()
    if notices:
        new = calls.changes.noticed(new, lambda: calls.own.inside, calls.original)
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
        # By paths: rank 0 may put a directory aside between two looks at it, and rmtree takes that for an attack.
        yield shutil, "_use_fd_functions", False
    for name in ("_mkstemp_inner", "mkdtemp"):
        yield tempfile, name, calls.named_temporarily(vars(tempfile)[name])
    closer = vars(tempfile)["_TemporaryFileCloser"]
    name = "cleanup" if hasattr(closer, "cleanup") else "close"
    # Its own default is the original function.
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
# All ranks run the same program, and all of them write the same files. For the view of one process, every rank has its
# own disk: it reads back what it writes, it does not see what it removes, `os.mkdir` makes a directory once, and no
# rank waits for another. The disk of rank 0 is the real one. The other ranks' changes go to a folder of the run
# (Overlay), which their reads prefer; a log says which paths are in it and which are removed.
#
# Ranks are not equally fast: rank 0 may have made "out" before another rank asks whether it exists. So before its first
# change of a path, rank 0 records the state of the path or puts the file aside (Journal), and the others look there
# before they look at the real disk. The order is: the record, then the change. A reader looks for records before and
# after (View.read), so it sees either the disk without the change, or the record.
#
# The state is kept in files, not in memory: loader workers forked from a rank see and change the same disk.
#
# The real disk serves paths that no rank changes for itself: devices, /proc, the caches of torch and of hubs,
# __pycache__, files that tempfile makes in its default folder (names of the rank's own, often handed to other
# programs), and downloads, which the first rank of a host does for all. C code that opens paths (h5py, pyarrow, sqlite,
# cv2) calls the same functions, see Note [Files of C code] in libraries.py. Other programs see and change the real
# disk, on every rank. So do ranks on another host that share a file system with rank 0's (NFS): they write to overlays
# too, but no record tells them what rank 0 has changed there since the start.

# Note [Order of a directory]
# The file system decides the order of os.listdir. A data set of a directory's files must have the same order on all
# ranks. So lagom sorts by name if ranks may see different directories: a directory that the program has changed, or any
# directory if ranks are on several hosts.
