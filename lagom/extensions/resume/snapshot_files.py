"""``SnapshotFiles``: reaches a run's snapshots from a rank: in the run's folder, or by the driver on other hosts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from lagom.digests import check_sha256, record_text
from lagom.errors import LagomError, SnapshotError
from lagom.program.payload import Parcel
from lagom.restart.kept_snapshots import FETCHED, UNREHEARSED, Snapshot, SnapshotPlace
from lagom.restart.written_files import is_here
from lagom.wire.client import deliver
from lagom.wire.spec import RunSpec

_STALL_S = 60.0


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

    def write(self, number: int, parcel: Parcel, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write snapshot ``number``; return a dict with its size ("bytes"), and the digest of its description.

        The digest's name is "description". If the snapshot was sent to the driver, the dict has in its place the
        digests of its two files ("sha256").

        Args:
            facts: the description of the snapshot.

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
            return {"bytes": size, "description": self._folder.complete(number, described)}
        with tempfile.TemporaryFile(dir=self._host_dir) as file:
            size = parcel.write(file.fileno())
            state = self._send(f"{FETCHED}-{number}", file.fileno())
        described = {**facts, "number": number, "bytes": size, "sha256": state}
        with tempfile.TemporaryFile(dir=self._host_dir) as file:
            file.write(record_text(described).encode())
            file.flush()
            return {"bytes": size, "sha256": [state, self._send(f"{FETCHED}-{number}.json", file.fileno())]}

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
