"""``SnapshotFiles``: reaches a run's snapshots from a rank: in the run's folder, or by the driver on other hosts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lagom.digests import check_sha256, record_text
from lagom.errors import LagomError, SnapshotError
from lagom.program.payload import Parcel
from lagom.restart.kept_snapshots import FETCHED, UNREHEARSED, Snapshot, SnapshotPlace
from lagom.restart.written_files import is_here
from lagom.wire.client import deliver
from lagom.wire.spec import RunSpec

_STALL_S = 60.0
UNSEEN = "does not see the run's folder, into which each rank writes its shards; set run_dir to a folder that all see"


class SnapshotFiles:
    """The files of one rank's snapshots.

    Args:
        place: the folder of snapshots, by its path on the driver, and the snapshot to go on from.
        host_dir: folder that the ranks of this host share during the run.
        payload_fd: file with the pickled call; on a host without the folder a copy of the call in the folder.
    """

    def __init__(self, place: SnapshotPlace, spec: RunSpec, host_dir: str, payload_fd: int) -> None:
        self._folder, self._spec, self._host_dir = place.folder, spec, host_dir
        self.resumed = place.resumed
        """The snapshot that the rank goes on from; None if it begins from the beginning."""
        self.last_number = place.last_number
        """Largest number of a snapshot of the run so far."""
        self.is_shared = self._folder.is_here()
        """Whether this host sees the run's folder."""
        self._payload_fd = payload_fd

    def open_call(self) -> int:
        """Return a descriptor of the call to which snapshots refer.

        Raises:
            OSError: if it is not there.
            LagomError: if other users can write to it, or if it is not the call with which the run began.
        """
        return self._folder.open_call() if self.is_shared else os.dup(self._payload_fd)

    @property
    def journal(self) -> str | None:
        """Return the file with the calls of MLflow, for a run that goes on; None if this host does not see it."""
        return self._folder.journal if self.is_shared else None

    def obstacle(self, rank: int) -> str:
        """Return why ``rank``, which is this one, can neither write nor read snapshots; an empty text if it can."""
        if self.is_shared or (self._spec.address is not None and self._spec.plan.rehearsal is None):
            return ""
        if self._spec.plan.rehearsal is not None:
            return f"{UNREHEARSED}{socket.gethostname()} does not see the run's folder, where a rehearsal keeps its own"
        try:
            self._folder.folder.check_own()
        except (OSError, LagomError) as error:
            if os.path.exists(self._folder.path):
                return str(error)
        where = f"{socket.gethostname()}, which holds rank {rank},"
        return f"{where} cannot read and write {self._folder.path}; set run_dir to a folder that all hosts share"

    def unsent(self) -> str | None:
        """Return the name of a file in the run's own working directory on this host, if there is one; else None."""
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._host_dir}/files") as entries:
            return next((entry.name for entry in entries), None)
        return None

    def write(
        self,
        number: int,
        parcel: Parcel,
        facts: Mapping[str, Any],
        wait: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    ) -> dict[str, Any]:
        """Write snapshot ``number``; return a dict with its size ("bytes"), and the digest of its description.

        The digest's name is "description". If the snapshot was sent to the driver, the dict has in its place the
        digests of its two files ("sha256").

        Args:
            facts: the description of the snapshot.
            wait: waits until all ranks have written their shards, and returns the descriptions of the files; None if
                ranks have none.

        Raises:
            LagomError: if the driver does not take the files.
            OSError: if the files cannot be written.
        """
        if self.is_shared:
            digest = hashlib.sha256()
            with open(self._folder.create_partial(number), "wb") as file:
                size = parcel.write(file.fileno(), digest)
                os.fsync(file.fileno())
            described = {**facts, "number": number, "bytes": size, "sha256": digest.hexdigest()}
            if wait is not None:
                described["parts"] = wait()
                size += sum(part["bytes"] for part in described["parts"])
            return {"bytes": size, "description": self._folder.complete(number, described)}
        with tempfile.TemporaryFile(dir=self._host_dir) as file:
            size = parcel.write(file.fileno())
            state = self._send(f"{FETCHED}-{number}", file.fileno())
        described = {**facts, "number": number, "bytes": size, "sha256": state}
        with tempfile.TemporaryFile(dir=self._host_dir) as file:
            file.write(record_text(described).encode())
            file.flush()
            return {"bytes": size, "sha256": [state, self._send(f"{FETCHED}-{number}.json", file.fileno())]}

    def write_part(self, number: int, rank: int, parcel: Parcel, version: str) -> None:
        """Write the shards of ``rank``, which is this one, for snapshot ``number``, and note for rank 0 that they are.

        Args:
            version: text that is equal on two ranks if their shards belong to the same state.

        Raises:
            OSError: if the file cannot be written.
        """
        digest = hashlib.sha256()
        with open(self._folder.create_part(number, rank), "wb") as file:
            size = parcel.write(file.fileno(), digest)
            os.fsync(file.fileno())
        self.note_part(number, rank, {"bytes": size, "sha256": digest.hexdigest(), "version": version})

    def remove_parts(self, rank: int, but: int) -> None:
        """Remove what ``rank`` has written for snapshots that were not completed, except for snapshot ``but``."""
        self._folder.remove_parts(rank, but)

    def note_part(self, number: int, rank: int, facts: Mapping[str, Any]) -> None:
        """Note for rank 0 that the shards of ``rank`` are written ("bytes"), or why they are not ("why")."""
        self._folder.note_part(number, rank, facts)

    def wait_for_parts(
        self, number: int, world_size: int, version: str, pause: Callable[[], None]
    ) -> list[Mapping[str, Any]]:
        """Wait until all ranks have written their shards for snapshot ``number``; return the files' descriptions.

        Args:
            pause: waits a little; raises an error if there is nothing to wait for any more.

        Raises:
            LagomError: if a rank could not write its shards, or they belong to another state than ``version``.
        """
        parts: list[Mapping[str, Any]] = []
        for rank in range(world_size):
            while (noted := self._folder.noted_part(number, rank)) is None:
                pause()
            if "why" in noted:
                raise LagomError(f"rank {rank} could not write its shards: {noted['why']}")
            if noted["version"] != version:
                raise LagomError(f"the shards of rank {rank} belong to another step of the program")
            parts.append({"bytes": noted["bytes"], "sha256": noted["sha256"]})
        return parts

    def open_parts(self, snapshot: Snapshot) -> list[int]:
        """Return descriptors of the files with shards of the snapshot that the rank goes on from, in rank order.

        The driver has compared their digests before the ranks began; a rank reads only some ranges.

        Raises:
            OSError: if a file is not there.
            LagomError: if another user can have written to it.
            SnapshotError: if this host does not see the run's folder, or if a file has another size than it was given.
        """
        if snapshot.parts and not self.is_shared:
            raise SnapshotError(f"{socket.gethostname()} {UNSEEN}")
        parts = [self._folder.open_part(snapshot.number, rank) for rank in range(len(snapshot.parts))]
        for rank, (fd, part) in enumerate(zip(parts, snapshot.parts, strict=True)):
            if os.fstat(fd).st_size != part["bytes"]:
                raise SnapshotError(f"snapshot {snapshot.number} is damaged: the part of rank {rank} has another size")
        return parts

    def _send(self, name: str, fd: int) -> str:
        spec = self._spec
        assert spec.address is not None
        digest = deliver(spec.address, spec.secret, name, fd, _STALL_S, spec.certificate)
        if digest is None:
            raise LagomError("the driver does not take it")
        return digest

    def remove_partial(self, number: int) -> None:
        """Remove the files of snapshot ``number``, which could not be written; the driver removes those sent to it."""
        if self.is_shared:
            self._folder.remove_partial(number)

    def open_state(self, snapshot: Snapshot) -> int:
        """Return a descriptor of the state that the rank goes on from.

        Raises:
            OSError: if the file is not there.
            LagomError: if this host sees the run's folder, and other users can write to it.
            SnapshotError: if it is not the state that the driver means.
        """
        if not self.is_shared:
            return os.open(f"{self._host_dir}/{FETCHED}", os.O_RDONLY)
        self._folder.check_owner()
        fd = self._folder.open_state(snapshot.number)
        try:
            check_sha256(fd, snapshot.facts["sha256"])
        except ValueError as error:
            os.close(fd)
            raise SnapshotError(f"snapshot {snapshot.number} is damaged: {error}") from error
        return fd

    def check_written(self) -> None:
        """Check that this host sees the files that lost attempts have saved, or were appending to at the snapshot.

        Raises:
            SnapshotError: if one of them is on a disk that only another host sees.
        """
        if self.resumed is None or (written := self._spec.files) is None:
            return
        lengths = self.resumed.facts["lengths"]
        hosts = {path: file.host for path, file in written.appended.items() if lengths.get(path)}
        hosts |= {path: versions[-1].host for path, versions in written.saved.items()}
        for path, host in hosts.items():
            if host and not is_here(path, host):
                here = socket.gethostname()
                raise SnapshotError(f"the program has written {path} on another host, whose disk {here} does not see")
