"""``BatchBroadcast``: rank 0 gives any value to all ranks; ``BatchFiles`` does so in threads of the program."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from lagom.collectives.agreement_exchange import SIZE, memory, signature
from lagom.errors import DivergenceError
from lagom.payload import Parcel, classes_received, unpack_file, unpack_parts
from lagom.run_state.kept_memory import KeptMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lagom.loaders.reading_threads import Publication
    from lagom.session.session import Session

_PLACE = "the next batch of a data loader with workers"
_TOGETHER = 1 << 16
"""Bytes that travel in one message with their sizes; larger parts are broadcast one by one."""


class BatchBroadcast:
    """Gives values of rank 0 to all ranks. Each rank owns its copy; tensors that share memory share it in the copy."""

    def __init__(self, session: Session) -> None:
        assert session.group is not None
        self._session = session
        self._group = session.group
        self._mark = signature(_PLACE.encode())
        self._memory = KeptMemory()

    def send(self, value: object) -> None:
        """Send ``value`` from rank 0; a collective, in which the other ranks ``receive``.

        Raises:
            DivergenceError: on all ranks, if one is at another place of the program.
            PayloadError: if ``value`` cannot be pickled, before the other ranks notice anything.
        """
        parts = [memoryview(part) for part in _pack(value).parts()]
        sizes = json.dumps([len(part) for part in parts]).encode()
        small = b"".join(parts) if sum(map(len, parts)) <= _TOGETHER else b""
        self._exchange(bytearray(len(sizes).to_bytes(8, "little") + sizes + small))
        if not small:
            for part in parts:
                self._group.broadcast(_as_tensor(part))

    def receive(self) -> Any:
        """Return the value that rank 0 sends; a collective.

        Raises:
            DivergenceError: on all ranks, if one is at another place of the program.
        """
        row = self._exchange(None)
        start = 8 + int.from_bytes(row[:8], "little")
        sizes = json.loads(bytes(row[8:start]))
        parts = _cut(row[start:], sizes) if len(row) > start else map(self._receive_part, sizes)
        return unpack_parts(list(parts))

    def _receive_part(self, size: int) -> memoryview:
        part = self._memory.empty((size,), torch.uint8)
        self._group.broadcast(part)
        return memory(part)

    def _exchange(self, body: bytearray | None) -> memoryview:
        """Exchange signatures; return what follows rank 0's."""
        rows = self._group.exchange(self._mark, None if body is None else memoryview(body))
        if any(row[:SIZE] != self._mark for row in rows):
            divergence = self._session.divergence
            assert divergence is not None
            divergence.find_divergence(_PLACE)
            raise DivergenceError(f"other ranks were not at {_PLACE}")
        return rows[0][SIZE:]


class BatchFiles:
    """Gives values of rank 0 to the same thread of the other ranks of its host, through files.

    Rank 0 does not wait for the other ranks. A reader maps the file privately, so that it owns what it changes.
    """

    def __init__(self, session: Session, publication: Publication) -> None:
        self._others = [rank for rank in range(session.world_size) if rank != session.rank]
        self._rank = session.rank
        self._folder = session.host_dir
        self._publication = publication

    def send(self, value: object) -> None:
        """Send ``value`` from rank 0.

        Raises:
            PayloadError: if ``value`` cannot be pickled, before the other ranks notice anything.
        """
        parcel = _pack(value)
        name = f"batch-{uuid4().hex}"
        path = self._folder / name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            parcel.write(fd)
            for rank in self._others:  # each reader removes a name of its own
                os.link(path, self._folder / f"{name}-{rank}")
        finally:
            os.close(fd)
            path.unlink()
        self._publication.publish(name.encode())

    def receive(self) -> Any:
        """Return the value that rank 0 sends.

        Raises:
            LagomError: if none comes.
        """
        path = self._folder / f"{self._publication.read().decode()}-{self._rank}"
        fd = os.open(path, os.O_RDONLY)
        try:
            path.unlink()
            return unpack_file(fd)
        finally:
            os.close(fd)


def _pack(value: object) -> Parcel:
    return Parcel(value, classes_received(), compact=True)


def _cut(row: memoryview, sizes: list[int]) -> Iterable[bytearray]:
    """Cut ``row``, which the next exchange overwrites, into writable parts of these sizes."""
    for size in sizes:
        yield bytearray(row[:size])
        row = row[size:]


def _as_tensor(part: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8)
