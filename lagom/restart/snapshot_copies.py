"""``SnapshotCopies``: copies the snapshots of a run to a URL, and from there to a machine that goes on with it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lagom.errors import LagomError
from lagom.restart.kept_snapshots import CALL, FOLDER, RESULT, SETTINGS, Snapshot, SnapshotFolder, no_snapshots
from lagom.restart.run_lease import RunLease, remove

EVERY_S = 10.0
_TRIES = 3
_PARTS = 10
"""After a copy, wait at least this many times as long as it took."""
_NAME = re.compile(r"snapshot-(\d+)\.(json|state|part-\d+)")

log = logging.getLogger("lagom")


class SnapshotCopies:
    """The snapshots of one run at a URL.

    Args:
        system: file system of fsspec.
        root: folder of the run in ``system``.
        url: URL of that folder, for messages.
    """

    def __init__(self, system: Any, root: str, url: str) -> None:
        self._system, self._root, self._url = system, f"{root}/{FOLDER}", url
        self._lease = RunLease(system, f"{self._root}/driver.json", url)
        self._folder = SnapshotFolder("")
        self._sent: tuple[int, float] | None = None
        self._over = threading.Event()
        self._warned: set[object] = set()
        self.failed = False
        """Whether the copy at the end of the block has failed."""

    @contextmanager
    def going_on(self, folder: SnapshotFolder, *, is_new: bool) -> Iterator[None]:
        """Hold the run's lease in the block, and copy snapshots to the URL.

        At the end, copy the newest snapshot, or the result in place of all snapshots if the run has returned. After
        Ctrl-C this last copy is left out. If the run has returned before, only copy its call, settings and result to
        this machine.

        Args:
            folder: folder on this machine, which has the call if the run ``is_new``; else it is filled from the URL.

        Raises:
            LagomError: if the run has kept no snapshots, or if another process goes on with it.
            Exception: the file system's error.
        """
        self._folder = folder
        there = set() if is_new else self._names()
        if is_new:
            self._system.makedirs(self._root, exist_ok=True)
        elif not {CALL, SETTINGS} <= there:
            raise LagomError(no_snapshots(self._url))
        if RESULT in there:
            self._fetch((CALL, SETTINGS, RESULT))
            yield
            return
        try:
            self._lease.take()
            if is_new:
                for name in (CALL, SETTINGS):
                    self._put(name)
            else:
                self._fetch(name for name in (CALL, SETTINGS, *folder.journals) if name in there)
            yield from self._copying()
        finally:
            self._lease.release()

    def _copying(self) -> Iterator[None]:
        thread = threading.Thread(target=self._copy_on, name="lagom-snapshots", daemon=True)
        thread.start()
        try:
            yield
        except KeyboardInterrupt:
            self._over.set()  # the last copy may be minutes old, and another one take minutes
            raise
        except BaseException:
            self._over.set()
            self._finish(thread)
            raise
        self._over.set()
        self._finish(thread)

    def fetch_newest(self) -> None:
        """Copy the newest complete snapshot to this machine, unless the run has returned."""
        there = self._names()
        if RESULT not in there and (newest := next(self._complete_ones(there), None)) is not None:
            parts = sorted(name for name in there if name.startswith(f"snapshot-{newest}.part-"))
            self._fetch((f"snapshot-{newest}.state", *parts, f"snapshot-{newest}.json"))
            found = self._folder.newest()
            self._sent = None if found is None else (found.number, found.facts["at"])

    def _fetch(self, names: Iterable[str]) -> None:
        if not os.path.exists(self._folder.path):
            self._folder.make()
        for name in names:
            self._system.get_file(f"{self._root}/{name}", f"{self._folder.path}/{name}")
            os.chmod(f"{self._folder.path}/{name}", 0o600)

    def copy_newest(self) -> None:
        """Copy the newest snapshot to the URL, with the files that grow, and remove the other snapshots there.

        Do nothing if the newest snapshot was copied before, or if another process has taken the lease.
        """
        self._lease.check()
        newest = self._folder.newest()
        if self._lease.is_lost or newest is None or self._sent == (newest.number, newest.facts["at"]):
            return
        with _held(newest) as held:
            names = [Path(path).name.removeprefix(".sent-") for path in held]
            if names[-1] in self._names():  # of an incomplete snapshot: no number is used twice
                remove(self._system, f"{self._root}/{names[-1]}")
            for path, name in zip(held[:-1], names[:-1], strict=True):
                self._system.put_file(path, f"{self._root}/{name}")
            for name in self._folder.journals:
                self._put(name)
            self._system.put_file(held[-1], f"{self._root}/{names[-1]}")
        self._sent = newest.number, newest.facts["at"]
        self._remove_all_but(names)

    def _copy_on(self) -> None:
        pause_s = EVERY_S
        while not self._over.wait(pause_s):
            began = time.monotonic()
            self._try(self.copy_newest)
            pause_s = max(EVERY_S, _PARTS * (time.monotonic() - began))

    def _finish(self, thread: threading.Thread) -> None:
        """Copy the last snapshot; or the result in place of all, if the run has returned."""
        thread.join()
        for number in range(_TRIES):
            if number:
                time.sleep(number)
            if self._try(self._put_result if os.path.exists(f"{self._folder.path}/{RESULT}") else self.copy_newest):
                return
        self.failed = True

    def _put_result(self) -> None:
        self._lease.check()
        if not self._lease.is_lost:
            self._put(RESULT)
            self._remove_all_but(())

    def _try(self, step: Callable[[], None]) -> bool:
        """Run ``step``, and return whether it succeeded; if not, warn with the reason."""
        try:
            step()
        except Exception as error:  # each file system has errors of its own
            self._warn(type(error), f"{self._url} took no snapshot: {type(error).__name__}: {error}")
            return False
        return True

    def _warn(self, about: object, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", text)

    def _remove_all_but(self, names: Iterable[str]) -> None:
        try:
            for name in sorted(self._names().difference(names)):  # the description first
                if _NAME.fullmatch(name):
                    remove(self._system, f"{self._root}/{name}")
        except Exception as error:
            self._warn("old", f"older snapshots at {self._url} cannot be removed: {type(error).__name__}: {error}")

    def _complete_ones(self, there: set[str]) -> Iterator[str]:
        """Yield the numbers of complete snapshots, as their names have them, the newest first."""
        for name in sorted(there, reverse=True):
            if (
                (found := _NAME.fullmatch(name)) is None
                or found[2] != "json"
                or f"snapshot-{found[1]}.state" not in there
            ):
                continue
            with suppress(ValueError, FileNotFoundError):
                facts = json.loads(self._system.cat_file(f"{self._root}/{name}"))
                sizes = {"state": facts["bytes"]}
                sizes |= {f"part-{rank}": part["bytes"] for rank, part in enumerate(facts.get("parts", ()))}
                start = f"{self._root}/snapshot-{found[1]}"
                if all(self._system.size(f"{start}.{end}") == size for end, size in sizes.items()):
                    yield found[1]

    def _names(self) -> set[str]:
        """Return the names of the files at the URL."""
        with suppress(AttributeError):
            self._system.invalidate_cache()
        try:
            return {str(path).rpartition("/")[2] for path in self._system.ls(self._root, detail=False)}
        except FileNotFoundError:
            return set()

    def _put(self, name: str) -> None:
        path = f"{self._folder.path}/{name}"
        if os.path.exists(path):
            self._system.put_file(path, f"{self._root}/{name}")


@contextmanager
def _held(snapshot: Snapshot) -> Iterator[list[str]]:
    """Keep the files of a snapshot under other names in the block, since newer snapshots may replace it meanwhile."""
    paths = [f"{snapshot.folder}/{name}" for name in snapshot.names]
    held = [f"{snapshot.folder}/.sent-{Path(path).name}" for path in paths]
    try:
        for path, other in zip(paths, held, strict=True):
            with suppress(FileNotFoundError):
                os.unlink(other)  # of a process that was killed
            try:
                os.link(path, other)
            except PermissionError:  # on a disk that has no links
                shutil.copyfile(path, other)
        yield held
    finally:
        for other in held:
            with suppress(FileNotFoundError):
                os.unlink(other)
