"""``Reporter``: the object that a training function gets as ``reporter``, to send metrics and text to the driver."""

from __future__ import annotations

import numbers
from typing import Any

from lagom.session.session import Session


class Reporter:
    """Reports metrics and text while the function runs; in a search, a report may end the trial."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step = -1

    def broadcast(self, metric: Any, step: int | None = None) -> None:
        """Report the number ``metric`` at ``step``; if ``step`` is None, at the step after that of the last report.

        Raises:
            ValueError: if ``metric`` is not a number, or ``step`` is not a whole number of 0 or more, or is less than
                the step of the last report.
            TrialPruned: in a search, if the driver ends the trial.
        """
        value = metric.item() if hasattr(metric, "item") and getattr(metric, "size", None) is not None else metric
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"broadcast() got {metric!r} as metric; want a number")
        step = self._step + 1 if step is None else step
        least = max(self._step, 0)
        if isinstance(step, bool) or not isinstance(step, int) or step < least:
            raise ValueError(f"broadcast() got step {step!r}; want a whole number, at least {least} by now")
        self._step = step
        self._session.progress.reported_values = {"metric": float(value), "step": step}
        if (call := self._session.events.reported.call) is not None:
            call(step, float(value))

    def part(self, name: str) -> Any:
        """Return what the extension ``name`` keeps for this rank; None if it keeps nothing."""
        return self._session.parts.get(name)

    def log(self, text: object, verbose: bool = True, *, jupyter: bool = False) -> None:
        """Print ``text``, as the program's own ``print`` does; print nothing if ``verbose`` and ``jupyter`` are False.

        Args:
            jupyter: the name of ``verbose`` in later releases of Maggy.
        """
        if verbose or jupyter:
            print(text, flush=True)
