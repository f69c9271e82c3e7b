"""``snapshots_on_rank``: a rank takes snapshots, or continues from one, by the events of its session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom.disk import growing_lengths
from lagom.extensions.resume.sharded_snapshots import ShardedSnapshots
from lagom.extensions.resume.sigterm_notice import sigterm_heard
from lagom.extensions.resume.snapshot_files import SnapshotFiles
from lagom.extensions.resume.snapshot_taker import Snapshots
from lagom.on_rank.process_settings import library_settings, set_process_settings

if TYPE_CHECKING:
    from lagom.program.signature import Call
    from lagom.session.session import Session

SETTINGS = library_settings, set_process_settings


@contextmanager
def snapshots_on_rank(session: Session) -> Iterator[None]:
    """Context manager of a rank whose run may keep snapshots; a rehearsal has snapshots of its own."""
    rank_call = session.rank_call
    if rank_call is not None and rank_call.spec.snapshots is not None and session.plan.rehearsal is None:
        spec, rank_spec = rank_call.spec, rank_call.rank_spec
        files = SnapshotFiles(rank_call.spec.snapshots, spec, rank_spec.host_dir, rank_spec.payload_fd)
        shards = session.resumption.shards
        kind = Snapshots if shards is None or not shards.is_sharding else ShardedSnapshots
        snapshots = kind(
            session,
            files,
            rank_spec.payload_fd,
            rank_call.tell,
            rank_call.ask,
            rank_call.own_classes,
            growing_lengths,
            SETTINGS,
            rank_spec.notice_fd,
        )
        join_events(session, snapshots)
        if rank_spec.sigterm_fd is not None:
            with sigterm_heard(rank_spec.sigterm_fd):
                yield
            return
    yield


def join_events(session: Session, snapshots: Snapshots) -> None:
    """Let ``snapshots`` prepare the function, and follow the passes over loaders."""
    session.parts["resume"] = snapshots
    session.resumption.is_resumable, session.resumption.journal = True, snapshots.journal
    snapshots.program.services = session.resumption.services
    session.events.function.add(functools.partial(_prepared, snapshots))
    follow_loaders(session, snapshots)


def follow_loaders(session: Session, snapshots: Snapshots) -> None:
    """Let ``snapshots`` follow the passes over loaders."""
    events, loaders = session.events, snapshots.program.loaders
    events.pass_begun.subscribe(loaders.begin_pass)
    events.batch_asked.subscribe(snapshots.point)
    events.batch_asked.subscribe(loaders.take_batch)
    events.batch_given.subscribe(loaders.gave_batch)
    events.pass_exhausted.subscribe(loaders.end_pass)


def _prepared(
    snapshots: Snapshots, make: Callable[[], Callable[[], Any]], call: Call, known: dict[str, Any], stack: ExitStack
) -> Callable[[], Callable[[], Any]]:
    stack.enter_context(snapshots.program.installed())

    def prepare() -> Callable[[], Any]:
        rest = snapshots.prepare(call, known)
        return functools.partial(snapshots.program.run, make() if rest is None else rest)

    return prepare
