"""``WorkerContext``: a multiprocessing context whose workers are watched, or absent on ranks that use rank 0's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import signal_handling

from lagom.batches.sharing.worker_watch import run_watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.batches.sharing.worker_watch import WorkerWatch


class WorkerContext:
    """Replaces the ``multiprocessing_context`` of a loader while its iterator starts workers.

    If the rank uses the workers of rank 0, its own workers are absent: no processes are started for them.

    Args:
        context: the real context.
        begin: returns whether this rank's workers are absent, and a ``WorkerWatch`` that notes side effects of its
            workers, or None if they are not watched. It is called once, when the first queue is made.
    """

    def __init__(self, context: Any, begin: Callable[[], tuple[bool, WorkerWatch | None]]) -> None:
        self._context = context
        self._begin: Callable[[], tuple[bool, WorkerWatch | None]] | None = begin
        self._absent = False
        self._watch: WorkerWatch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> Any:
        """Return a real queue the first time (for results), later an ``AbsentQueue`` if the workers are absent."""
        if self._begin is not None:
            self._absent, self._watch = self._begin()
            self._begin = None
            return self._context.Queue()
        return AbsentQueue() if self._absent else self._context.Queue()

    def Process(self, *, target: Any, args: tuple[Any, ...]) -> Any:
        """Return the process of a worker, or an ``AbsentWorker`` if rank 0 has the worker."""
        if self._absent:
            return AbsentWorker(self._context, target, args)
        if self._watch is not None:
            target, args = run_watched, (self._watch, target, *args)
        return self._context.Process(target=target, args=args)


class AbsentQueue:
    """Task queue of an absent worker; it keeps the tasks as long as the worker may still be started."""

    def __init__(self) -> None:
        self.tasks: list[Any] | None = []

    def put(self, task: Any) -> None:
        """Leave ``task`` to the worker of another rank."""
        if self.tasks is not None:
            self.tasks.append(task)

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing: there is no pipe."""


class AbsentWorker:
    """Stands for the process of a worker that another rank has.

    Args:
        context, target, args: used by ``start_late`` to start the process; left out if it is never called.
    """

    daemon = True
    pid = 0x7FFFFFFF
    """A process id that no process has, since the program may send a signal to it."""

    def __init__(self, context: Any = None, target: Any = None, args: tuple[Any, ...] = ()) -> None:
        self._context, self._target, self._args = context, target, args

    def start(self) -> None:
        """Start nothing."""

    def is_alive(self) -> bool:
        """Return False: no process was started."""
        return False

    def join(self, timeout: float | None = None) -> None:
        """Wait for nothing."""

    def start_late(self, absent: AbsentQueue) -> tuple[Any, Any]:
        """Start the worker with the tasks that its queue ``absent`` has kept; return the process and its real queue."""
        queue = self._context.Queue()
        queue.cancel_join_thread()
        args = tuple(queue if one is absent else one for one in self._args)
        process = self._context.Process(target=self._target, args=args)
        process.daemon = True
        process.start()
        for task in absent.tasks or ():
            queue.put(task)
        return process, queue


def start_workers(iterator: Any) -> None:
    """Start the absent workers of an ``iterator`` that has received nothing yet."""
    pairs = zip(iterator._workers, iterator._index_queues, strict=True)
    started = [worker.start_late(queue) for worker, queue in pairs]
    iterator._workers, iterator._index_queues = map(list, zip(*started, strict=True))
    signal_handling._remove_worker_pids(id(iterator))
    signal_handling._set_worker_pids(id(iterator), tuple(worker.pid for worker in iterator._workers))


def stop_workers(iterator: Any) -> None:
    """Stop the workers of an ``iterator`` without outstanding tasks, and replace them with ``AbsentWorker`` objects."""
    status = list(iterator._workers_status)
    iterator._shutdown_workers()
    iterator._shutdown = False
    iterator._workers_done_event.clear()
    iterator._workers_status = status
    iterator._workers = [AbsentWorker() for _ in status]
    iterator._index_queues = [AbsentQueue() for _ in status]
    forget_tasks(iterator)


def forget_tasks(iterator: Any) -> None:
    """Drop the tasks of absent workers, which can no longer be started."""
    for queue in iterator._index_queues:
        if isinstance(queue, AbsentQueue):
            queue.tasks = None
