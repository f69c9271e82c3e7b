"""``SnapshotFiles``: a rank's way to the run's snapshots: its folder, or the driver, if the host sees no folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from lagom.errors import LagomError, SnapshotError
from lagom.payload import Parcel
from lagom.restart.kept_snapshots import FETCHED, UNREHEARSED, Snapshot, SnapshotPlace
from lagom.restart.prepared_files import is_here
from lagom.wire.client import deliver
from lagom.wire.spec import RunSpec

_STALL_S = 60.0


class SnapshotFiles:
    """The files of one rank's snapshots.

    Args:
        place: the run's folder, as the driver sees it.
        host_dir: folder of the run on this host.
        payload_fd: file of the call, as the driver keeps it.
    """

    def __init__(self, place: SnapshotPlace, spec: RunSpec, host_dir: str, payload_fd: int) -> None:
        self._folder, self._spec, self._host_dir = place.folder, spec, host_dir
        self.resumed = place.resumed
        """The snapshot that the rank goes on from."""
        self.last_number = place.last_number
        """Largest number of a snapshot of the run so far."""
        self.is_shared = self._folder.is_here()
        """Whether this host sees the run's folder."""
        self.call = self._folder.call if self.is_shared else f"/proc/self/fd/{payload_fd}"
        """File with the call, to which snapshots refer."""

    @property
    def journal(self) -> str | None:
        """Return the file for the program's calls of services, which a resumed run does not repeat."""
        return self._folder.journal if self.is_shared else None

    def obstacle(self, rank: int) -> str:
        """Return why ``rank`` cannot keep snapshots; an empty text if it can."""
        if self.is_shared or (self._spec.address is not None and self._spec.plan.rehearsal is None):
            return ""
        if self._spec.plan.rehearsal is not None:
            return f"{UNREHEARSED}{socket.gethostname()} does not see the run's folder, where a rehearsal keeps its own"
        where = f"{socket.gethostname()}, which holds rank {rank},"
        return f"{where} cannot read and write {self._folder.path}; set run_dir to a folder that all hosts share"

    def unsent(self) -> str | None:
        """Return the name of a file in a working directory that only this host has; None if there is none."""
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._host_dir}/files") as entries:
            return next((entry.name for entry in entries), None)
        return None

    def write(self, number: int, parcel: Parcel, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write snapshot ``number``; return its size and, if it was sent to the driver, the digests of its files.

        Raises:
            LagomError: if the driver does not take the files.
        """
        if self.is_shared:
            with open(self._folder.partial(number), "wb", opener=_private) as file:
                size = parcel.write(file.fileno())
                os.fsync(file.fileno())
            self._folder.complete(number, {**facts, "number": number, "bytes": size})
            return {"bytes": size}
        with tempfile.TemporaryFile(dir=self._host_dir) as file:
            size = parcel.write(file.fileno())
            state = self._send(f"{FETCHED}-{number}", file.fileno())
        described = {**facts, "number": number, "bytes": size, "sha256": state}
        with tempfile.TemporaryFile(dir=self._host_dir) as file:
            file.write(json.dumps(described).encode())
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
        """Remove the files of snapshot ``number``, which could not be written."""
        if self.is_shared:
            self._folder.remove_partial(number)

    def path(self, snapshot: Snapshot) -> str:
        """Return the file with the state that the rank goes on from.

        Raises:
            LagomError: if others than this user can write to the run's folder.
        """
        if not self.is_shared:
            return f"{self._host_dir}/{FETCHED}"
        self._folder.check_owner()
        return snapshot.path

    def check_written(self) -> None:
        """Check that this host sees the files that the program had written before the snapshot that it goes on from.

        Raises:
            SnapshotError: if a file is on the disk of another host.
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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
