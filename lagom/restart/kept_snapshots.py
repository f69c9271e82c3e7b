"""``SnapshotFolder``: the snapshots of one run on disk, and the newest of them from which it goes on."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagom.errors import LagomError

FOLDER, CALL, SETTINGS, RESULT = "snapshots", "call", "settings", "result"
_FILES, _CALLS = "files.jsonl", "calls.jsonl"
FETCHED = "snapshot"
"""Name under which hosts without the run's folder fetch a snapshot; begins the names of snapshots that they send."""
UNREHEARSED = "not rehearsed: "
"""Begins a reason for having no snapshots that holds for a rehearsal alone."""
_LOCK = ".lock"
_KEPT = 2
"""Snapshots that are kept: the newest, and the one before it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot: its folder, its number in the run, and its description."""

    folder: str
    number: int
    facts: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Return the file with the state."""
        return f"{self.folder}/{_name(self.number)}.state"

    @property
    def place(self) -> str:
        """Name the batch of the training that comes next in the program."""
        epoch, step = self.facts["place"]
        return f"batch {(step or 0) + 1} of epoch {epoch or 1}"


@dataclass(frozen=True, slots=True)
class SnapshotFolder:
    """Folder of a run's snapshots, with the call that they belong to."""

    path: str

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
        return Path(self.path).parent

    @property
    def call(self) -> str:
        """Return the file with the call."""
        return f"{self.path}/{CALL}"

    @property
    def result(self) -> str:
        """Return the file with the result of a run that has returned."""
        return f"{self.path}/{RESULT}"

    @property
    def journal(self) -> str:
        """Return the file with the program's calls of services, such as MLflow."""
        return f"{self.path}/{_CALLS}"

    @property
    def journals(self) -> tuple[str, ...]:
        """Return the names of the files that grow, beside the snapshots."""
        return _FILES, _CALLS

    @property
    def disk(self) -> str:
        """Return the folder with a rank's own disk, as it was in a rehearsal at the snapshot."""
        return f"{self.path}/disk"

    def make(self) -> None:
        """Make the folder, for this user alone."""
        Path(self.path).mkdir(mode=0o700, parents=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from going on with the run in the block.

        Raises:
            LagomError: if another process goes on with the run.
        """
        fd = os.open(f"{self.path}/{_LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise LagomError(f"the run is still going on in another process; it holds {self.path}/{_LOCK}") from error
        try:
            yield
        finally:
            os.close(fd)

    def is_here(self) -> bool:
        """Return whether this process can read what the driver has put here, and write beside it."""
        return os.access(self.call, os.R_OK) and os.access(self.path, os.W_OK)

    def newest(self) -> Snapshot | None:
        """Return the newest complete snapshot; None if there is none."""
        for number in reversed(self._numbers()):
            with suppress(OSError, ValueError):
                facts = json.loads(Path(f"{self.path}/{_name(number)}.json").read_text())
                if os.path.getsize(f"{self.path}/{_name(number)}.state") == facts["bytes"]:
                    return Snapshot(self.path, number, facts)
        return None

    def complete(self, number: int, facts: Mapping[str, Any]) -> None:
        """Write the description of snapshot ``number``, whose state is written; then put both in place."""
        with open(self.partial_facts(number), "w") as file:
            json.dump(dict(facts), file)
            file.flush()
            os.fsync(file.fileno())
        self.put_in_place(number)

    def put_in_place(self, number: int) -> None:
        """Give the written files of ``number`` their final names; remove all snapshots before the last two."""
        path = f"{self.path}/{_name(number)}"
        os.replace(self.partial(number), f"{path}.state")
        os.replace(self.partial_facts(number), f"{path}.json")
        for old in self._numbers()[:-_KEPT]:
            self._remove(old)

    def remove_partial(self, number: int) -> None:
        """Remove the files of snapshot ``number``, which could not be written."""
        for path in (self.partial(number), self.partial_facts(number)):
            with suppress(OSError):
                os.unlink(path)

    def remove_all(self) -> None:
        """Remove all snapshots, also incomplete ones."""
        for number in self._numbers():
            self._remove(number)
        self.remove_partials()

    def remove_partials(self, but: int = 0) -> None:
        """Remove the files of incomplete snapshots, except those of snapshot ``but``."""
        for path in Path(self.path).glob(".snapshot-*"):
            if not path.name.startswith(f".{_name(but)}."):
                path.unlink(missing_ok=True)

    def _remove(self, number: int) -> None:
        for kind in ("json", "state"):
            with suppress(OSError):
                os.unlink(f"{self.path}/{_name(number)}.{kind}")

    def partial(self, number: int) -> str:
        """Return the file for the state of ``number`` while it is written."""
        return f"{self.path}/.{_name(number)}.partial"

    def partial_facts(self, number: int) -> str:
        """Return the file for the description of ``number`` while it is written."""
        return f"{self.path}/.{_name(number)}.json"

    def add_message(self, message: Mapping[str, Any]) -> None:
        """Keep a message of rank 0 about its files, for a process that goes on with the run."""
        with suppress(OSError), open(f"{self.path}/{_FILES}", "a") as file:
            file.write(json.dumps(dict(message)) + "\n")

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the messages of rank 0 about its files."""
        with suppress(FileNotFoundError), open(f"{self.path}/{_FILES}") as file:
            for line in file:
                with suppress(ValueError):  # the last line, of a process that was killed
                    yield json.loads(line)

    def check_owner(self) -> None:
        """Check that no other user can have written to the folder, since its pickles run code as this user.

        Raises:
            LagomError: if another user can, or if there is no such folder.
        """
        for path in (self.path, self.call):
            try:
                status = os.stat(path)
            except OSError as error:
                raise LagomError(
                    f"the run has kept no snapshots in {self.path}: a run keeps them if it is called with "
                    "snapshot_every_s, a script with lagom run --snapshot-every"
                ) from error
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise LagomError(f"{path} is not this user's alone, so what it holds is not run; chown and chmod 700")

    def _numbers(self) -> list[int]:
        """Return the numbers of the snapshots that are there, in order; none if the folder has been removed."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        found = (re.fullmatch(r"snapshot-(\d+)\.json", name) for name in names)
        return sorted(int(one[1]) for one in found if one is not None)


def _name(number: int) -> str:
    return f"snapshot-{number:06d}"


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Folder in which the ranks of an attempt keep snapshots, and the snapshot that they go on from."""

    folder: SnapshotFolder
    resumed: Snapshot | None = None
    sha256: str = ""
    """SHA-256 of the state of ``resumed``, for hosts that may have to fetch it; empty if none has to."""
    last_number: int = 0
    """Largest number of a snapshot of the run so far: no number is used twice."""
