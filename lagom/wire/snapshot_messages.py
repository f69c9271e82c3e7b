"""Messages of snapshots; see ``wire/messages.py`` for the columns.

==============  =======  =============================================================
message         sent by  handled by
==============  =======  =============================================================
SnapshotPoint   rank 0   RankSupervisor
SnapshotMarked  host     resume: Snapshots
OutputMark      host     RunDisplay
NoSnapshot      rank 0   RunDisplay; rehearsal: RehearsedSnapshot
SnapshotKept    rank 0   RunView
SnapshotWanted  driver   RankSupervisor
SigtermHeard    host     RunView
==============  =======  =============================================================

===============  =======  ==========
event            put by   handled by
===============  =======  ==========
SnapshotArrived  RunView  RunDisplay
===============  =======  ==========
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lagom.wire.messages import LocalEvent, Message

LEAVE_SNAPSHOT_S = 7.0
"""Longest wait for the last snapshot after SIGTERM; Docker kills its processes after 10 s, others after 30."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPoint(Message, tag="snapshot point"):
    """The host process is to read and mark the output of its ranks; rank 0 waits for ``SnapshotMarked``."""

    number: int
    """Number of the snapshot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotMarked(Message, tag="marked"):
    """The output of the ranks has been marked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputMark(Message, tag="mark"):
    """All output that the driver has received so far belongs to the time before the snapshot."""

    number: int
    """Number of the snapshot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoSnapshot(Message, tag="no snapshot"):
    """No snapshot can be taken, for now or in the whole run."""

    is_sure = True
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotKept(Message, tag="snapshot"):
    """Rank 0 has written a snapshot, or has sent it to the driver."""

    is_sure = True
    number: int
    at: float
    """Seconds since 1970."""
    place: list[int | None]
    """Epoch and step."""
    bytes: int
    description: str = ""
    """SHA-256 of the description, if rank 0 has written the files; "" if it has sent them."""
    sha256: list[str] = field(default_factory=list)
    """SHA-256 of state and description, if rank 0 has sent the files."""
    is_wanted: bool = False
    """Whether the driver has wanted this snapshot, since the run is about to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotWanted(Message, tag="snapshot wanted"):
    """Rank 0 is to take a snapshot at the next batch: the run is about to be ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SigtermHeard(Message, tag="sigterm"):
    """A rank or the host process has received SIGTERM, and waits for a last snapshot and ``Stop``."""

    rank: int | None
    """The rank that has received it; None: the host process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotArrived(LocalEvent):
    """A snapshot has been written or sent."""

    kept: SnapshotKept
    is_whole: bool
    """Whether the bytes of a snapshot that was sent are those that came."""
