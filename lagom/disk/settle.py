"""``settle``: after a rank's end, moves files that rank 0 did not write from the rank's overlay to the real disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lagom.disk.journal import Journal, PathLog
from lagom.disk.overlay import clear, move
from lagom.restart.written_files import is_on_shared_disk

_OF_A_PROCESS = re.compile(r"\d+")


def settle(host_dir: Path, ranks: Sequence[int], local_ranks: Sequence[int]) -> list[str]:
    """Move files that rank 0 did not write from the overlays of ``ranks``, which have ended, to the real disk.

    Return a sentence for each failure. See Note [What is left].

    Args:
        local_ranks: the number of each of ``ranks`` on this host; 0 is the host's first rank.
    """
    folder = os.path.realpath(host_dir) + "/disk"
    problems: list[str] = []
    for rank, local_rank in zip(ranks, local_ranks, strict=True):
        own = f"{folder}/{rank}"
        if rank == 0 or not os.path.exists(own + "/log"):
            continue
        journal, log = Journal(folder), PathLog(own + "/log")
        try:
            journal.log.fresh()
            log.fresh()
            problems += _Remains(own, journal, log, first_of_host=local_rank == 0).bring_home(rank)
        finally:
            journal.close()
            log.close()
        shutil.rmtree(own, ignore_errors=True)
    return problems


def _put_files(log: PathLog, upper: str) -> Iterator[str]:
    """Yield the program's paths of the files and links, not pipes, that a rank has in its own folder ``upper``."""
    for key, entry in list(log.entries.items()):
        if entry.kind != "put":
            continue
        found = [upper + key]
        if os.path.isdir(upper + key) and not os.path.islink(upper + key):
            found = [f"{at}/{name}" for at, _, names in os.walk(upper + key) for name in names]
        yield from (path[len(upper) :] for path in found if os.path.isfile(path) or os.path.islink(path))


class _Remains:
    """The files in the overlay of one rank that has ended."""

    def __init__(self, folder: str, journal: Journal, log: PathLog, first_of_host: bool) -> None:
        self._upper = folder + "/files"
        self._journal = journal
        self._log = log
        self._first_of_host = first_of_host
        self._pid: str | None = None
        with suppress(OSError):
            self._pid = Path(folder, "asked").read_text()

    def bring_home(self, rank: int) -> list[str]:
        from lagom.disk.stand_ins import is_stand_in

        problems = self._remade(rank) if self._first_of_host else []
        for key in _put_files(self._log, self._upper):
            if not self._is_wanted(key) or is_stand_in(self._upper + key):
                continue
            try:
                os.makedirs(os.path.dirname(key), exist_ok=True)
                move(self._upper + key, key)
            except OSError as error:
                problems.append(f"{key}, which only rank {rank} wrote, could not be put there: {error.strerror}")
        return problems

    def _remade(self, rank: int) -> list[str]:
        """Repeat the rank's removals, and make its directories, on the real disk of a host without rank 0.

        Files that the rank has written to the real disk, such as downloads, stay.
        """
        problems = []
        real = {key for key, entry in self._log.entries.items() if entry.kind == "free"}
        for key, entry in list(self._log.entries.items()):
            place = self._upper + key
            made = entry.kind == "put" and os.path.isdir(place) and not os.path.islink(place)
            if not (made or entry.kind == "gone") or is_on_shared_disk(key):
                continue
            try:
                clear(key, kept=real)
                for at, _, _ in os.walk(place) if made else ():
                    os.makedirs(at[len(self._upper) :], exist_ok=True)
            except OSError as error:
                problems.append(f"{key}, which rank {rank} changed, could not be changed there: {error.strerror}")
        return problems

    def _is_wanted(self, key: str) -> bool:
        on_purpose = self._pid is not None and self._pid not in _OF_A_PROCESS.findall(key)
        if self._first_of_host:
            return on_purpose and not os.path.lexists(key) if is_on_shared_disk(key) else True
        if not on_purpose or key in self._journal.log.entries:
            return False
        return self._journal.log.nearest(key) is None or not os.path.lexists(key)


def keep_files(host_dir: Path, folder: str, cwd: str) -> list[str]:
    """Move the files in the overlay of a trial's rank 0 to ``folder``; return a sentence for each failure.

    Files below ``cwd`` go to ``folder/files``, others to ``folder/elsewhere`` under their whole path. Files that
    ``tempfile`` made stay where they are, since they are on the real disk.
    """
    own, cwd = os.path.realpath(host_dir) + "/disk/0", os.path.realpath(cwd)
    if not os.path.exists(own + "/log"):
        return []
    log, problems = PathLog(own + "/log"), list[str]()
    log.fresh()
    for key in _put_files(log, own + "/files"):
        below_cwd = key.startswith(cwd + "/")
        to = f"{folder}/files{key.removeprefix(cwd)}" if below_cwd else f"{folder}/elsewhere{key}"
        try:
            os.makedirs(os.path.dirname(to), exist_ok=True)
            move(own + "/files" + key, to)
        except OSError as error:
            problems.append(f"{key}, which a trial wrote, could not be kept in {folder}: {error.strerror}")
    log.close()
    return problems


# Note [What is left]
# The overlays of the other ranks hold the same files that rank 0 has on the real disk, and are removed with the run.
# But a program may call lagom.rank(), and let one rank write a file that the others do not write. Such a file is moved
# to the real disk when the rank has ended, normally or not; so the rank's host process does this. A file is moved if
# three conditions hold: the program has asked for its rank, rank 0 has not touched the path, and no number in the path
# is the pid of the rank. The third condition excludes files such as TensorBoard's events, which every rank writes under
# a name with its pid.
#
# On a host without rank 0 no rank has written to the real disk. There the changes of the host's first rank are made on
# the real disk, as if the program had run there, so that a later run finds the checkpoints on every host of this run.
# On file systems that rank 0's host may share, rank 0 has made its changes. There only files are moved that are not
# there yet, if the program has asked for its rank and no number in the path is the pid of the rank.
