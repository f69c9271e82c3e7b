"""``SparkJob``: something that Spark does, in a thread of its own, so that this one can show the run meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class SparkJob:
    """``function``, begun in a thread of the class that Spark wants; ``over`` is called there at its end."""

    def __init__(
        self,
        function: Callable[[], Any],
        thread_class: type[threading.Thread],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._value: Any = None
        self._error: BaseException | None = None

        def target() -> None:
            try:
                self._value = function()
            except BaseException as error:  # carried to the calling thread
                self._error = error
            finally:
                over()

        self._thread = thread_class(target=target, name="lagom-job", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for its end, but no longer than that."""
        self._thread.join(seconds)

    @property
    def lasts(self) -> bool:
        """Whether it has not come to its end."""
        return self._thread.is_alive()

    def result(self) -> Any:
        """Wait for its end; returns what the function did, or raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
