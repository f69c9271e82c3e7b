"""``Trial``: a trial on a rank: its reports, its pruning and its metric."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from lagom.errors import EndOfFunction, MetricError
from lagom.extensions.search.on_rank.messages import TrialAnswer, TrialValue


class TrialPruned(EndOfFunction):
    """Ends a trial that is worse than others."""


class Trial:
    """Sends the reports of a trial to the driver, and ends the trial when the driver says so."""

    def __init__(self, ask: Callable[[TrialValue], object], metric: str, number: int = 0) -> None:
        """Report values of ``metric`` with ``ask``, which sends a message to the driver and returns the answer."""
        self._ask = ask
        self.number = number
        self.metric = metric
        self.logged: float | None = None
        """The last value logged by the reporter, MLflow or TensorBoard: the metric, if the function returns nothing."""
        self._source = ""
        self._pruned = False

    def takes(self, source: str) -> bool:
        """Return whether ``source`` is the trial's first, which alone is reported. See Note [Reports] in reports.py."""
        self._source = self._source or source
        return self._source == source

    def report_by_reporter(self, step: int, value: float) -> None:
        """Report what the program has given to ``reporter``, unless it reports the metric in another way already."""
        if self.takes("reporter"):
            self.logged = value
            self.report(step, value)

    def report(self, step: int, value: float) -> None:
        """Report ``value`` at ``step``; wait for the driver's answer, about 1 ms.

        Raises:
            TrialPruned: if the trial is to end.
        """
        if not self._pruned:
            answer = self._ask(TrialValue(step=int(step), value=float(value)))
            assert isinstance(answer, TrialAnswer)
            self._pruned = answer.prune
        if self._pruned:  # also for a program that has caught the first exception
            raise TrialPruned


def metric_of(value: Any, key: str, logged: float | None = None) -> float:
    """Return the metric in the function's return ``value``: the number itself, or the entry ``key`` of a dict.

    A tensor or array of one element is a number too. If the function returns None, the metric is ``logged``, the value
    that the program has logged last.

    Raises:
        MetricError: if there is no such number.
    """
    metric: Any = value if value is not None else logged
    if isinstance(value, Mapping):
        if key not in value:
            names = ", ".join(map(repr, value)) or "nothing"
            raise MetricError(
                f"the function returned a dict with {names}, and not {key!r}; set optimization_key to one of its keys"
            )
        metric = value[key]
    if hasattr(metric, "item") and hasattr(metric, "shape"):
        if math.prod(metric.shape) != 1:
            raise MetricError(
                f"the metric is a {type(metric).__name__} of shape {tuple(metric.shape)}; want one number"
            )
        metric = metric.item()
    if isinstance(metric, numbers.Real):
        return float(metric)
    what = f"its entry {key!r}" if isinstance(value, Mapping) else "the function's return value"
    raise MetricError(f"{what} is {metric!r:.200}; want a number, which the search makes as large or small as it can")
