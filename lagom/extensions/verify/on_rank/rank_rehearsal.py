"""``rehearsal_on_rank``: a rank of a rehearsal, whose passes are short and whose actions are recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom.extensions.verify.on_rank.rehearsal import kept_output, numbered_parameters, rehearse
from lagom.extensions.verify.on_rank.truncate import truncated_passes

if TYPE_CHECKING:
    from lagom.program.signature import Call
    from lagom.run_state.leaves import Leaves
    from lagom.session.session import Session


@contextmanager
def rehearsal_on_rank(session: Session) -> Iterator[None]:
    """Context manager of a rank of a rehearsal; its function returns a ``Record``."""
    _keep_snapshot(session)
    with truncated_passes(session), numbered_parameters() as leaves:
        session.events.function.add(functools.partial(_recorded, session, leaves))
        yield


def _recorded(
    session: Session,
    leaves: Leaves,
    make: Callable[[], Callable[[], Any]],
    call: Call,
    known: dict[str, Any],
    stack: ExitStack,
) -> Callable[[], Callable[[], Any]]:
    # A snapshot is restored in ``make``, when standard output is what the program will write to.
    output = stack.enter_context(kept_output())
    return lambda: functools.partial(rehearse, session, leaves, make(), output)


def _keep_snapshot(session: Session) -> None:
    """Let the rank take the rehearsal's snapshot, or continue from one, if the driver has given it a folder."""
    rank_call = session.rank_call
    if rank_call is None or (place := rank_call.spec.snapshots) is None:
        return
    from lagom.disk import keep_disk, reach_disk
    from lagom.extensions.resume.rank_snapshots import SETTINGS, join_events
    from lagom.extensions.resume.snapshot_files import SnapshotFiles
    from lagom.extensions.verify.on_rank.rehearsed_snapshot import RehearsedSnapshot
    from lagom.on_rank.bootstrap import flush_files

    def no_lengths() -> dict[str, int]:
        """Save a rehearsal's overlay disk; return no lengths, since it appends to no file on the real disk."""
        flush_files(is_end=False)
        keep_disk(place.folder.disk)
        return {}

    rank_spec = rank_call.rank_spec
    files = SnapshotFiles(place, rank_call.spec, rank_spec.host_dir, rank_spec.payload_fd)
    reach_disk(place.folder.path)
    snapshots = RehearsedSnapshot(
        session, files, rank_spec.payload_fd, rank_call.ask, rank_call.own_classes, no_lengths, SETTINGS
    )
    join_events(session, snapshots)
