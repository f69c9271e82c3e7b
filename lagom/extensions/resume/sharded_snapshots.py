"""``ShardedSnapshots``: snapshots of a program whose state is sharded; each rank writes its shards."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from lagom.extensions.resume.frame_position import NoSnapshotError
from lagom.extensions.resume.passes.loader_positions import PASS_START
from lagom.extensions.resume.shard_files import on_cpu, shard_parcel
from lagom.extensions.resume.snapshot_files import UNSEEN
from lagom.extensions.resume.snapshot_taker import FORKED, PATIENCE_S, Snapshots, describe_error, fork, let_go
from lagom.wire.snapshot_messages import NoSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.run_state.state_shards import ShardParts, StateShards

    Pickled = tuple[bytes, list[memoryview]]

_ASK = b"snapshot"
_DONE = b"."
_PAUSE_S = 0.005
"""Seconds between two looks at whether another rank has written its shards."""


class ShardedSnapshots(Snapshots):
    """The snapshots of one rank of several, each of which has shards of the state. See Note [Shards in snapshots].

    Args:
        others: the arguments of ``Snapshots``.
    """

    def __init__(self, *others: Any) -> None:
        super().__init__(*others)
        session = self._session
        assert session.group is not None
        assert session.resumption.shards is not None
        self._group = session.group
        self._shards: StateShards = session.resumption.shards
        self._num_points = 0
        """Number of batches that this rank has requested so far."""
        self._is_due = False
        """Whether rank 0 requests a snapshot from the other ranks at the end of the next backward."""
        self._agreed: tuple[int, int] | None = None
        """Number of the batch before which all ranks take the next snapshot, and the number of this snapshot."""
        self._part: ShardParts | None = None
        """The shards of rank 0 in the snapshot that is being written."""
        self._part_number = 0
        """Number of the snapshot for which a fork writes this rank's shards, on ranks other than 0."""
        self._stuck_at = 0.0
        """Time at which a fork that still writes this rank's shards is killed as stuck."""
        session.group.handlers[_ASK] = lambda asked: self._agree(int(asked.split()[1]))
        session.events.backward_ended.subscribe(self.backward_ended)

    def point(self, iterator: Any) -> None:
        """Take the snapshot on which the ranks have agreed if it is to be taken here; else see whether one is due."""
        if not self._session.may_meet:
            if self._session.rank == 0 and time.perf_counter() >= self._pace.next_at:
                self._put_off("a loader is read in a thread of the program's", 0.0)
            return
        self._num_points += 1
        number = 0
        if self._agreed is not None and self._num_points >= self._agreed[0]:
            _, number = self._agreed
            self._agreed = None
        if self._session.rank == 0:
            self._point_of_first(iterator, number)
        elif number:
            self._take_part(number)
        elif self._child is not None:
            self._look_at_part()

    def backward_ended(self) -> None:
        """Request the due snapshot from the other ranks, which all have come to the end of a backward; on rank 0."""
        if self._is_due and self._session.may_meet:
            self._is_due = False
            number = self._number = self._number + 1
            self._group.ask(b"%s %d" % (_ASK, number))
            self._agree(number)

    def _agree(self, number: int) -> None:
        """Agree with the other ranks on the batch before which snapshot ``number`` is taken; a collective."""
        unseen = "" if self._files.is_shared else f"{socket.gethostname()}, which holds rank {self._session.rank},"
        rows = self._group.all_gather_bytes(json.dumps([self._num_points, unseen]).encode())
        points, hosts = zip(*map(json.loads, rows), strict=True)
        if host := next(filter(None, hosts), ""):
            if self._session.rank == 0:
                self._pace.stop()
                self._tell(NoSnapshot(why=f"{host} {UNSEEN}"))
            return
        self._agreed = max(points) + 1, number

    def _point_of_first(self, iterator: Any, number: int) -> None:
        self._see_whether_wanted()
        if number:
            self._try_at(iterator)
            if self._child is None and self._pace.next_at <= time.perf_counter():
                self._pace.put_off(0.0)  # loader workers prevent snapshots in this pass
        elif time.perf_counter() < self._pace.next_at:
            return
        elif self._child is not None:
            self._look()
        elif self._agreed is None and not (iterator._num_yielded and vars(iterator)[PASS_START] is self._refused):
            try:
                self._check_here()
                self._is_due = True
            except NoSnapshotError as error:
                self._put_off(str(error), 0.0)

    def _next_number(self) -> int:
        return self._number  # ``backward_ended`` has counted it

    def _pickle_here(self, frames: Any, iterator: Any) -> Callable[[], Pickled] | None:
        found = super()._pickle_here(frames, iterator)
        if found is not None:
            self._part = self._collect()
        return found

    def _pickle_in_fork(self, frames: Any, iterator: Any) -> Pickled:
        torch.set_num_threads(1)  # torch's threads are not in the fork
        self._part = self._shards.collect()
        return super()._pickle_in_fork(frames, iterator)

    def _collect(self) -> ShardParts:
        try:
            return on_cpu(self._shards.collect())
        except Exception as error:  # it must not end the program, as an error in a fork does not
            raise NoSnapshotError(describe_error(error)) from error

    def _write(self, number: int, pickled: bytes, buffers: list[memoryview]) -> dict[str, Any]:
        assert self._part is not None
        version, rank = self._version(self._part), os.getppid()
        self._files.write_part(number, 0, shard_parcel(self._part), version)

        def pause() -> None:
            if os.getppid() != rank:
                raise NoSnapshotError("the rank has ended")
            time.sleep(_PAUSE_S)

        def wait() -> Any:
            return self._files.wait_for_parts(number, self._session.world_size, version, pause)

        return self._files.write(number, self._parcel(pickled, buffers), self._facts, wait)

    def _version(self, part: ShardParts) -> str:
        return f"{part.version} {self._session.passes.progress}"

    def _take_part(self, number: int) -> None:
        """Write the shards of this rank, which is not rank 0, in a fork."""
        if self._child is not None:  # rank 0 has found all shards of the last snapshot, so this fork is at its end
            self._end_part()
        try:
            part = None if self._session.device.type in FORKED else self._collect()
            pid, reader, writer = fork()
        except NoSnapshotError as error:
            self._note_failure(number, str(error))
            return
        if pid == 0:
            self._write_part_in_fork(number, part, writer)
        os.close(writer)
        self._child, self._answer, self._part_number = pid, reader, number
        self._stuck_at = time.perf_counter() + PATIENCE_S

    def _write_part_in_fork(self, number: int, part: ShardParts | None, writer: int) -> None:
        """Write shards in a fork, and end the fork; without ``part``, collect the rank's shards first.

        Before its end the fork sends a byte by ``writer``, if rank 0 can read how it has ended.
        """
        rank = self._session.rank
        try:
            os.nice(10)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in the fork of rank 0
            let_go(writer)
            if part is None:
                torch.set_num_threads(1)
                part = self._shards.collect()
            self._files.remove_parts(rank, but=number)
            self._files.write_part(number, rank, shard_parcel(part), self._version(part))
            os.write(writer, _DONE)
        except BaseException as error:
            with suppress(BaseException):
                self._files.remove_parts(rank, but=0)  # the disk may be full
                self._files.note_part(number, rank, {"why": describe_error(error)})
                os.write(writer, _DONE)
        finally:
            os._exit(0)

    def _note_failure(self, number: int, why: str) -> None:
        with suppress(OSError):
            self._files.note_part(number, self._session.rank, {"why": why})

    def _look_at_part(self) -> None:
        """See whether the fork has written this rank's shards; kill a fork that is stuck."""
        assert self._child is not None
        with suppress(ChildProcessError):  # the program has waited for it
            if os.waitpid(self._child, os.WNOHANG)[0] == 0:
                if time.perf_counter() > self._stuck_at:
                    os.kill(self._child, signal.SIGKILL)
                return
        if os.read(self._answer, 1) != _DONE:
            self._note_failure(self._part_number, "the process that wrote them was killed")
        os.close(self._answer)
        self._child = None

    def _end_part(self) -> None:
        assert self._child is not None
        with suppress(ChildProcessError):
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        os.close(self._answer)
        self._child = None


# Note [Shards in snapshots]
#
# With ZeRO each rank has its own shards of optimizer state, gradients and parameters. All else is equal on all ranks,
# so rank 0 pickles the program as without ZeRO (Note [Snapshots] in snapshot_taker.py), with references in place of
# sharded values. Each rank, rank 0 too, writes its shards to a file of its own, also in a fork. No rank gathers shards.
#
# Point. All files must belong to the same step. When a snapshot is due, rank 0 sends a request at the end of a backward
# (Note [Asking] in exchange/requests.py): there the other ranks are about to exchange too, so nobody waits long. All
# ranks tell how many batches they have requested, and take the snapshot before the batch after the largest of these
# numbers. So each rank still has it before itself, however far the ranks are apart. Each file has a text with the
# progress and the numbers of optimizer steps; rank 0 compares the texts.
#
# Complete or not there. Files with shards have hidden names until rank 0's fork has the descriptions of all of them. It
# waits for them by looking at the folder; a rank whose fork has failed or was killed notes the reason there. At last it
# renames all files, the description of the snapshot last.
#
# To continue, any number of ranks unpickles what rank 0 has pickled, and each of them reads from the files of all
# earlier ranks the bytes that belong to its own shards. One rank reads everything.
