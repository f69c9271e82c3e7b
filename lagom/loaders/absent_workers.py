"""``AbsentContext``: a multiprocessing context that starts no workers yet, for a rank that gets another's batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class AbsentContext:
    """Stands for the ``multiprocessing_context`` of a loader's iterator while that makes its workers.

    Args:
        context: the real one.
        are_absent: tells whether workers stay absent; called once, when the first queue is made.
    """

    def __init__(self, context: Any, are_absent: Callable[[], bool]) -> None:
        self._context = context
        self._are_absent = are_absent
        self._absent: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> Any:  # a name of multiprocessing
        """Return a queue: the first one, for results, is real."""
        if self._absent is None:
            self._absent = self._are_absent()
            return self._context.Queue()
        return AbsentQueue() if self._absent else self._context.Queue()

    def Process(self, *, target: Any, args: tuple[Any, ...]) -> Any:  # a name of multiprocessing
        """Return a worker."""
        if self._absent:
            return AbsentWorker(self._context, target, args)
        return self._context.Process(target=target, args=args)


class AbsentQueue:
    """Queue of the tasks of an absent worker: keeps them until somebody else has done one."""

    def __init__(self) -> None:
        self._tasks: list[Any] | None = []
        self._real: Any = None

    def put(self, task: Any) -> None:
        """Put ``task``."""
        if self._real is not None:
            self._real.put(task)
        elif self._tasks is not None:
            self._tasks.append(task)

    def forget(self) -> None:
        """Forget the tasks: the worker cannot start any more."""
        self._tasks = None

    def begin(self, real: Any) -> None:
        """Move all tasks to the queue ``real``."""
        tasks, self._tasks, self._real = self._tasks, None, real
        for task in tasks or ():
            real.put(task)

    def cancel_join_thread(self) -> None:
        """Do what a real queue does."""
        if self._real is not None:
            self._real.cancel_join_thread()

    def close(self) -> None:
        """Close the queue."""
        if self._real is not None:
            self._real.close()


class AbsentWorker:
    """Stands for the process of a worker, which may start later."""

    def __init__(self, context: Any, target: Any, args: tuple[Any, ...]) -> None:
        self._context = context
        self._made_of: Any = (target, args)
        self._real: Any = None
        self.daemon = True

    @property
    def pid(self) -> int:
        """Number of the process; 0 for none."""
        return 0 if self._real is None else int(self._real.pid)

    def start(self) -> None:
        """Start nothing."""

    def start_late(self) -> None:
        """Start the process, which does all tasks in its queue."""
        target, args = self._made_of
        tasks = next(one for one in args if isinstance(one, AbsentQueue))
        queue = self._context.Queue()
        queue.cancel_join_thread()
        real = self._context.Process(target=target, args=tuple(queue if one is tasks else one for one in args))
        real.daemon = True
        real.start()
        self._real, self._made_of = real, None
        tasks.begin(queue)

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._real is not None and bool(self._real.is_alive())

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process."""
        if self._real is not None:
            self._real.join(timeout)

    def terminate(self) -> None:
        """End the process."""
        if self._real is not None:
            self._real.terminate()
