"""``add_snapshot``: a file of a run's snapshots that a test writes, with the digest that lagom would have given it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lagom.restart.kept_snapshots import SnapshotFolder


def add_snapshot(
    folder: SnapshotFolder, number: int, state: bytes = b"state", place: Sequence[int] = (1, 1), at: float = 0.0
) -> None:
    """Add a snapshot as a rank does."""
    with open(folder.create_partial(number), "wb") as file:
        file.write(state)
    digest = hashlib.sha256(state).hexdigest()
    facts = {"bytes": len(state), "sha256": digest, "place": [*place], "at": at, "lengths": {}, "world_size": 1}
    folder.complete(number, facts)
