"""``SnapshotFolder``: the snapshots of one run on disk, and the newest of them from which it goes on."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagom.digests import check_sha256, ended_digest, parse_record, record_text
from lagom.errors import LagomError
from lagom.run_folder import FolderReference, RunFolder

FOLDER, CALL, SETTINGS, RESULT = "snapshots", "call", "settings", "result"
_FILES, _CALLS = "files.jsonl", "calls.jsonl"
_NOTED = "kept"
"""What a line of ``_FILES`` tells: a snapshot; all lines about files that the program had written then are before."""
_UNKNOWN = "files that the program wrote shortly before the loss may stay as they are"
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
    def parts(self) -> Sequence[Mapping[str, Any]]:
        """Return the descriptions ("bytes", "sha256") of the files with shards, by rank; none without ZeRO."""
        found: Sequence[Mapping[str, Any]] = self.facts.get("parts", ())
        return found

    @property
    def names(self) -> list[str]:
        """Return the names of the files in the folder, the description last."""
        parts = [_part(self.number, rank) for rank in range(len(self.parts))]
        return [f"{_name(self.number)}.state", *parts, f"{_name(self.number)}.json"]

    @property
    def place(self) -> str:
        """Name the batch of the training that comes next in the program."""
        epoch, step = self.facts["place"]
        return f"batch {(step or 0) + 1} of epoch {epoch or 1}"


class SnapshotFolder:
    """Folder of a run's snapshots, with the call that they belong to. Other processes get it by pickle.

    Args:
        path: path of the folder.
        folder: the folder, if it is open; else it is opened when it is first used.
    """

    def __init__(self, path: str, folder: RunFolder | None = None) -> None:
        self.path = path
        self.call_sha256 = ""
        """SHA-256 of the call's pickle; empty if this process has neither written nor read it."""
        self._folder = folder
        self._reference: FolderReference | None = None
        self._kept: dict[int, str] = {}
        """SHA-256 of the descriptions of the snapshots that ranks have told this process about, by number."""
        self._damaged: set[int] = set()
        """Numbers of the snapshots that were found damaged."""

    def __getstate__(self) -> dict[str, Any]:
        reference = self._reference
        if self._folder is not None:
            reference = self._folder.reference()
        return {"path": self.path, "call_sha256": self.call_sha256, "reference": reference}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SnapshotFolder.__init__(self, state["path"])
        self.call_sha256, self._reference = state["call_sha256"], state["reference"]

    @classmethod
    def of(cls, run: RunFolder, *, make: bool = False) -> SnapshotFolder:
        """Return the folder of the snapshots of ``run``; ``make`` it for a new run.

        Raises:
            OSError: if there is no such folder, or it cannot be made.
        """
        return cls(str(run.path / FOLDER), run.subfolder(FOLDER, make=make))

    @property
    def folder(self) -> RunFolder:
        """Return the open folder.

        Raises:
            OSError: if it is not there, or is another one than the process had that has sent it to this one.
        """
        if self._folder is None or not self._folder.is_of_this_process:
            if self._folder is not None:
                self._reference = self._reference or self._folder.reference()
            self._folder = RunFolder.open(self.path) if self._reference is None else self._reference.open()
        return self._folder

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
        return Path(self.path).parent

    @property
    def call(self) -> str:
        """Return the file with the call."""
        return f"{self.path}/{CALL}"

    @property
    def journal(self) -> str:
        """Return the file with the program's calls of services, such as MLflow, by a path for this process alone."""
        return str(self.folder.at(_CALLS))

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
        self._folder = RunFolder.make(self.path)

    def has_result(self) -> bool:
        """Return whether the run has returned, and its result is here."""
        return self.folder.exists(RESULT)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from going on with the run in the block.

        Raises:
            LagomError: if another process goes on with the run.
        """
        fd = self.folder.open_file(_LOCK, os.O_RDWR | os.O_CREAT)
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
        with suppress(OSError):
            folder = self.folder
            return os.access(folder.at(CALL), os.R_OK) and os.access(folder.at(), os.W_OK)
        return False

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot whose description is whole; None if there is none."""
        for number in reversed(self._numbers()):
            with suppress(OSError, ValueError):
                return self._described(number)
        return None

    def newest_whole(self, say: Callable[[str], None]) -> Snapshot | None:
        """Return the newest snapshot whose bytes are all as they were written; ``say`` which newer ones are damaged.

        Return None if there is none. From now on, damaged snapshots do not count.
        """
        for number in reversed(self._numbers()):
            if isinstance(found := self._checked(number), Snapshot):
                return found
            self._damaged.add(number)
            say(f"snapshot {number} is damaged, and left out: {found}")
        return None

    def _checked(self, number: int) -> Snapshot | str:
        """Return snapshot ``number``, or what is wrong with it."""
        try:
            snapshot = self._described(number)
            with open(self.open_state(number), "rb") as file:
                check_sha256(file.fileno(), snapshot.facts["sha256"])
            for rank, part in enumerate(snapshot.parts):
                with open(self.open_part(number, rank), "rb") as file:
                    check_sha256(file.fileno(), part["sha256"])
        except (OSError, ValueError, LagomError) as error:
            return " ".join(str(error).split())
        return snapshot

    @property
    def has_damaged(self) -> bool:
        """Return whether a snapshot was found damaged."""
        return bool(self._damaged)

    def _described(self, number: int) -> Snapshot:
        """Return snapshot ``number`` by its description, whose state has the size that it is to have.

        Raises:
            OSError: if a file is missing, or cannot be read.
            ValueError: if the description is damaged, or is not the one that was written.
            LagomError: if it is not this user's.
        """
        text = self.folder.read(f"{_name(number)}.json", own=True)
        facts = parse_record(text)
        if self._kept.get(number, found := hashlib.sha256(text).hexdigest()) != found:
            raise ValueError("its description is not the one that was written")
        if not {"bytes", "sha256", "place", "at", "lengths"} <= facts.keys():
            raise ValueError("its description is not complete")
        size = os.lstat(self.folder.at(f"{_name(number)}.state")).st_size
        if size != facts["bytes"]:
            raise ValueError(f"its state has {size} bytes instead of {facts['bytes']}")
        snapshot = Snapshot(self.path, number, facts)
        for rank, part in enumerate(snapshot.parts):
            size = os.lstat(self.folder.at(_part(number, rank))).st_size
            if size != part["bytes"]:
                raise ValueError(f"the part of rank {rank} has {size} bytes instead of {part['bytes']}")
        return snapshot

    def open_state(self, number: int) -> int:
        """Return a descriptor of the state of snapshot ``number``.

        Raises:
            OSError: if it is not there.
            LagomError: if another user can have written to it.
        """
        return self.folder.open_file(f"{_name(number)}.state", own=True)

    def open_part(self, number: int, rank: int) -> int:
        """Return a descriptor of the shards that ``rank`` has written for snapshot ``number``; see ``open_state``."""
        return self.folder.open_file(_part(number, rank), own=True)

    def open_call(self, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of the call.

        Raises:
            OSError: if it is not there.
            LagomError: if another user can have written to it, or if it is not the call that this process knows.
        """
        fd = self.folder.open_file(CALL, flags, own=True)
        try:
            digest = ended_digest(fd)
            if self.call_sha256 not in ("", digest):
                raise ValueError("it is not the one with which the run began")
        except ValueError as error:
            os.close(fd)
            raise LagomError(f"{self.call} is damaged: {error}") from error
        return fd

    def note_kept(self, number: int, sha256: str) -> None:
        """Note the SHA-256 of the description of snapshot ``number``, as its writer has told it."""
        self._kept[number] = sha256
        self.add_message({"what": _NOTED, "number": number})

    def create_partial(self, number: int) -> int:
        """Return the descriptor of a new file for the state of snapshot ``number``."""
        self.folder.remove(_partial(number))
        return self.folder.open_file(_partial(number), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def create_part(self, number: int, rank: int) -> int:
        """Return the descriptor of a new file for the shards of ``rank`` in snapshot ``number``."""
        self.folder.remove(_partial_part(number, rank))
        return self.folder.open_file(_partial_part(number, rank), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def note_part(self, number: int, rank: int, facts: Mapping[str, Any]) -> None:
        """Describe the shards of ``rank``, which are written, or could not be, for rank 0."""
        self.folder.write(_note_of_part(number, rank), record_text(facts), sync=True)

    def remove_parts(self, rank: int, but: int) -> None:
        """Remove the shards of ``rank`` in incomplete snapshots, except in snapshot ``but``."""
        for name in self.folder.names():
            if re.fullmatch(rf"\.snapshot-\d+\.part-{rank}(\.json)?", name) and not name.startswith(f".{_name(but)}."):
                self.folder.remove(name)

    def noted_part(self, number: int, rank: int) -> Mapping[str, Any] | None:
        """Return what ``rank`` has noted about its shards in snapshot ``number``; None if it has noted nothing yet."""
        try:
            return parse_record(self.folder.read(_note_of_part(number, rank), own=True))
        except FileNotFoundError:
            return None

    def complete(self, number: int, facts: Mapping[str, Any]) -> str:
        """Write the description of snapshot ``number``, whose state is written; then put both in place.

        Return the SHA-256 of the description.
        """
        text = record_text(facts)
        self.folder.write(_partial_facts(number), text, sync=True)
        for rank in range(len(facts.get("parts", ()))):
            self.folder.rename(_partial_part(number, rank), _part(number, rank))
            self.folder.remove(_note_of_part(number, rank))
        self.put_in_place(number)
        return hashlib.sha256(text.encode()).hexdigest()

    def put_in_place(self, number: int) -> None:
        """Give the written files of ``number`` their final names; remove all snapshots before the last two."""
        self.folder.rename(_partial(number), f"{_name(number)}.state")
        self.folder.rename(_partial_facts(number), f"{_name(number)}.json")
        for old in self._numbers()[:-_KEPT]:
            self._remove(old)

    def remove_partial(self, number: int) -> None:
        """Remove the files of snapshot ``number``, which could not be written."""
        parts = [name for name in self.folder.names() if name.startswith(f".{_name(number)}.part-")]
        for name in (_partial(number), _partial_facts(number), *parts):
            with suppress(OSError):
                self.folder.remove(name)

    def remove_all(self) -> None:
        """Remove all snapshots, also incomplete ones."""
        for number in sorted({*self._numbers(), *self._damaged}):
            self._remove(number)
        self.remove_partials()

    def remove_partials(self, but: int = 0) -> None:
        """Remove the files of incomplete snapshots, except those of snapshot ``but``."""
        for name in self.folder.names():
            if name.startswith(".snapshot-") and not name.startswith(f".{_name(but)}."):
                self.folder.remove(name)

    def _remove(self, number: int) -> None:
        parts = [name for name in self.folder.names() if name.startswith(f"{_name(number)}.part-")]
        for name in (f"{_name(number)}.json", f"{_name(number)}.state", *parts):
            with suppress(OSError):
                self.folder.remove(name)

    def partial(self, number: int) -> str:
        """Return the path of the state of ``number`` while it is written, for this process alone."""
        return str(self.folder.at(_partial(number)))

    def partial_facts(self, number: int) -> str:
        """Return the path of the description of ``number`` while it is written, for this process alone."""
        return str(self.folder.at(_partial_facts(number)))

    def add_message(self, message: Mapping[str, Any]) -> None:
        """Keep a message of rank 0 about its files, for a process that goes on with the run."""
        with (
            suppress(OSError),
            open(self.folder.open_file(_FILES, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file,
        ):
            file.write(f"{record_text(message)}\n".encode())

    def messages(self, snapshot: Snapshot, say: Callable[[str], None]) -> Iterator[Mapping[str, Any]]:
        """Yield the messages of rank 0 about its files; cut off half a line, which a killed process has left.

        If there is half a line, or the file has nothing about ``snapshot``, ``say`` so.

        Raises:
            LagomError: if the file is damaged, or if another user can have written to it.
        """
        try:
            fd = self.folder.open_file(_FILES, os.O_RDWR, own=True)
        except FileNotFoundError:
            say(f"{self.path}/{_FILES} is not there: {_UNKNOWN}")
            return
        except OSError as error:
            raise LagomError(f"{self.path}/{_FILES} is damaged: {error}") from error
        with open(fd, "r+b") as file:
            length, last, is_whole = 0, 0, False
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    os.ftruncate(fd, length)
                    is_whole = False
                    break
                length += len(line)
                try:
                    message = parse_record(line)
                except ValueError as error:
                    raise LagomError(
                        f"{self.path}/{_FILES} is damaged in line {number}, so it is not known which files the run has "
                        f"written: {error}; begin a new run"
                    ) from error
                if message.get("what") == _NOTED:
                    last = int(message["number"])
                    is_whole |= last == snapshot.number
                else:
                    yield message
        if last > snapshot.number and last not in self._damaged:
            say(f"snapshot {last} is not there any more")
        if not is_whole:
            say(f"{self.path}/{_FILES} ends early, since the driver was killed or it is damaged: {_UNKNOWN}")

    def check_owner(self) -> None:
        """Check that no other user can have written to the folder, since its pickles run code as this user.

        Raises:
            LagomError: if another user can, or if there is no such folder.
        """
        try:
            self.folder.check_own()
            os.close(self.folder.open_file(CALL, own=True))
        except FileNotFoundError as error:
            raise LagomError(no_snapshots(self.run_dir)) from error
        except OSError as error:
            raise LagomError(f"{self.path} is damaged: {error}") from error

    def _numbers(self) -> list[int]:
        """Return the numbers of the snapshots that are there, in order, without those that were found damaged."""
        try:
            names = self.folder.names()
        except OSError:  # the folder has been removed
            return []
        found = (re.fullmatch(r"snapshot-(\d+)\.json", name) for name in names)
        return sorted({int(one[1]) for one in found if one is not None} - self._damaged)


def no_snapshots(place: str | Path) -> str:
    """Return the text of the error that the run at ``place`` has no snapshots."""
    return (
        f"the run at {place} has kept no snapshots: a run keeps them if it is called with snapshot_every_s, a script "
        "with lagom run --snapshot-every"
    )


def _partial(number: int) -> str:
    return f".{_name(number)}.partial"


def _partial_facts(number: int) -> str:
    return f".{_name(number)}.json"


def _name(number: int) -> str:
    return f"snapshot-{number:06d}"


def _part(number: int, rank: int) -> str:
    return f"{_name(number)}.part-{rank}"


def _partial_part(number: int, rank: int) -> str:
    return f".{_part(number, rank)}"


def _note_of_part(number: int, rank: int) -> str:
    return f".{_part(number, rank)}.json"


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Folder in which the ranks of an attempt keep snapshots, and the snapshot that they go on from."""

    folder: SnapshotFolder
    resumed: Snapshot | None = None
    sha256: str = ""
    """SHA-256 of the state of ``resumed``, for hosts that may have to fetch it; empty if none has to."""
    last_number: int = 0
    """Largest number of a snapshot of the run so far: no number is used twice."""
