"""``SharedWorkers``: the workers of one iterator, which are processes of rank 0."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch._utils import ExceptionWrapper

from lagom.batches.sharing.absent_workers import forget_tasks, stop_workers
from lagom.batches.sharing.batch_broadcast import BatchBroadcast
from lagom.batches.sharing.loader_trial import NEVER
from lagom.errors import LagomError, PayloadError
from lagom.program.payload import InParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.batches.sharing.worker_watch import WorkerWatch
    from lagom.session.session import Session


class SharedWorkers:
    """Gives all ranks what one iterator receives from its workers, which are processes of rank 0.

    Args:
        cores: the cores that each rank may use.
        watch: watches the workers; None on ranks other than 0, or where workers cannot be watched.
        remember: remembers for later iterators whether workers are shared.
    """

    def __init__(
        self, session: Session, cores: list[list[int]], watch: WorkerWatch | None, remember: Callable[[int], None]
    ) -> None:
        self._session = session
        self._cores = cores
        self.watch = watch
        self.remember = remember
        self.broadcast = BatchBroadcast(session)
        self.has_given = False
        """Whether anything was received from the workers."""

    def place(self, iterator: Any) -> None:
        """Pin rank 0's workers of ``iterator`` to the cores of all ranks in turn, if ranks have different cores."""
        if self._session.rank or all(cores == self._cores[0] for cores in self._cores):
            return
        for number, worker in enumerate(iterator._workers):
            with suppress(OSError):  # a container may forbid the cores of another container
                os.sched_setaffinity(worker.pid, self._cores[number % len(self._cores)])

    def take_over(self, iterator: Any) -> None:
        """Stop the workers of the ranks other than 0: rank 0's workers do all further tasks."""
        self.has_given = True
        if self._session.rank:
            stop_workers(iterator)
        self.place(iterator)

    def get(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Return what ``original(iterator)`` returns on rank 0, or raise its error; a collective.

        Raises:
            LagomError: on all ranks, if a worker has asked for its rank.
        """
        self.has_given = True
        forget_tasks(iterator)
        if not self._session.rank:
            return self._get_and_send(original, iterator)
        task, error, alive, has_changed = self.broadcast.receive()
        for worker, is_alive in enumerate(alive):
            if iterator._workers_status[worker] and not is_alive:
                iterator._mark_worker_as_unavailable(worker)
        if has_changed:
            self.remember(NEVER)
        if error is not None:
            raise error
        return task

    def _get_and_send(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        send = self.broadcast.send
        try:
            result = original(iterator)
            if self.watch is not None and self.watch.has_asked:
                raise LagomError(_ASKED)
        except Exception as error:
            # A worker has died, timed out or asked for its rank. torch returns errors of the data set as data.
            try:
                send((None, InParts(error), iterator._workers_status, False))
            except PayloadError:
                send((None, RuntimeError(f"{type(error).__name__}: {error}"), iterator._workers_status, False))
            raise
        has_changed = self.watch is not None and self.watch.has_changed
        if has_changed:
            self._session.say_once(_CHANGED)
            self.remember(NEVER)
        try:
            send((result, None, (), has_changed))
        except PayloadError as error:
            # The error is sent as data, so that the iterators of all ranks count this task as done.
            unsent = LagomError(f"a batch cannot be given to the other ranks: {error}")
            result = result[0], ExceptionWrapper((LagomError, unsent, None), "a data loader")
            send((result, None, (), has_changed))
        return result


_ASKED = (
    "a worker of a data loader has asked for its rank, but the ranks share the workers of this data loader; use "
    "share_loading=False"
)
_CHANGED = (
    "the workers of a data loader have begun to change files, to map shared memory or to start programs; ranks share "
    "these workers until this iteration ends, so that ranks other than 0 may not see what they change. With "
    "share_loading=False each rank has workers of its own"
)
