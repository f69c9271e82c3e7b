"""``reporter``: what a training function that asks for one can tell the driver."""

from __future__ import annotations

import numbers
from typing import Any

from lagom.patching.session import Session


class Reporter:
    """Reports metrics and text while the function runs; does nothing to the run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = 0

    def broadcast(self, metric: Any, step: int | None = None) -> None:
        """Report the number ``metric`` at ``step``; without a step, one more than at the last report.

        Raises:
            ValueError: when ``metric`` is no number, or ``step`` does not grow.
        """
        value = metric.item() if hasattr(metric, "item") and getattr(metric, "size", None) is not None else metric
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"broadcast() got {metric!r} as metric; want a number")
        step = self._steps if step is None else step
        if isinstance(step, bool) or not isinstance(step, int) or step < self._steps:
            raise ValueError(f"broadcast() got step {step!r}; want a whole number, at least {self._steps} by now")
        self._steps = step + 1
        self._session.reported = {"metric": float(value), "step": step}

    def log(self, text: object, verbose: bool = True) -> None:
        """Print ``text``, once over all ranks; with ``verbose=False``, nothing."""
        if verbose:
            print(text, flush=True)
