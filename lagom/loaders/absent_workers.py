"""``AbsentContext``: a multiprocessing context that starts no workers, for a rank that gets another's batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class AbsentContext:
    """Stands for the ``multiprocessing_context`` of a loader's iterator while that makes its workers.

    Args:
        context: the real one.
        are_absent: tells whether workers are absent; called once, when the first queue is made.
    """

    def __init__(self, context: Any, are_absent: Callable[[], bool]) -> None:
        self._context = context
        self._are_absent = are_absent
        self._absent: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> Any:
        """Return a queue: the first one, for results, is real."""
        if self._absent is None:
            self._absent = self._are_absent()
            return self._context.Queue()
        return AbsentQueue() if self._absent else self._context.Queue()

    def Process(self, *, target: Any, args: tuple[Any, ...]) -> Any:
        """Return a worker."""
        return AbsentWorker() if self._absent else self._context.Process(target=target, args=args)


class AbsentQueue:
    """Queue of the tasks of an absent worker."""

    def put(self, task: Any) -> None:
        """Leave ``task`` to the worker of another rank."""

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing: there is no pipe."""


class AbsentWorker:
    """Stands for the process of a worker that another rank has."""

    daemon = True
    pid = 0

    def start(self) -> None:
        """Start nothing."""

    def is_alive(self) -> bool:
        """Return False."""
        return False

    def join(self, timeout: float | None = None) -> None:
        """Wait for nothing."""
