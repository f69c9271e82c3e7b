"""``SparkJob``: runs one Spark action in another thread, so that the calling thread can show the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class SparkJob:
    """Runs ``function`` in a thread of ``thread_class`` after ``start``; the thread calls ``over`` at its end."""

    def __init__(
        self,
        function: Callable[[], Any],
        thread_class: type[threading.Thread],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._begun = False
        self._over = threading.Event()

        def target() -> None:
            try:
                self._value = function()
            except BaseException as error:  # raised in the calling thread by result()
                self._error = error
            finally:
                self._over.set()
                over()

        self._thread = thread_class(target=target, name="lagom-job", daemon=True)

    def start(self) -> None:
        """Start the thread, once. It may run even if this raises: Ctrl-C can come between its start and the return."""
        self._begun = True
        try:
            self._thread.start()
        except RuntimeError:  # this process may have no more threads
            self._begun = False
            raise

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the end, for at most ``seconds``."""
        self._over.wait(seconds)

    @property
    def lasts(self) -> bool:
        """Return whether the job is still running."""
        return self._begun and not self._over.is_set()

    def result(self) -> Any:
        """Wait for the end; return the function's value, or raise its error."""
        self._over.wait()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
