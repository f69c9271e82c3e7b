"""``BatchBroadcast``: rank 0 gives any value that can be pickled to all ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import SIZE, memory, signature
from lagom.program.payload import Parcel, unpack_parts
from lagom.run_state.kept_memory import KeptMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lagom.session.session import Session

_PLACE = "the next batch of a data loader with workers"
_TOGETHER = 1 << 16
"""Up to this many bytes, all parts travel in one message with their sizes; otherwise they are broadcast one by one."""


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
            PayloadError: if ``value`` cannot be pickled; nothing has been sent then, so another value can be sent.
        """
        parts = [memoryview(part) for part in Parcel(value, by_reference=True).parts()]
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
            Exception: any error of unpickling the value on this rank.
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
        """Exchange signatures, with rank 0's ``body`` behind its own; return that body."""
        rows = self._group.exchange(self._mark, None if body is None else memoryview(body))
        if any(row[:SIZE] != self._mark for row in rows):
            divergence = self._session.backwards.divergence
            assert divergence is not None
            divergence.find_divergence(_PLACE)
            raise DivergenceError(f"other ranks were not at {_PLACE}")
        return rows[0][SIZE:]


def _cut(row: memoryview, sizes: list[int]) -> Iterable[bytearray]:
    """Cut ``row``, which the next exchange overwrites, into writable parts of these sizes."""
    for size in sizes:
        yield bytearray(row[:size])
        row = row[size:]


def _as_tensor(part: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8)
