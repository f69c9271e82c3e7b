"""``Axis``: places values on a line: linearly, by their logarithms, or (texts, few numbers) one after another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lagom.result import short
from lagom.watch.chart import number_text, round_ticks

_LOG_RATIO = 100  # ratio of the largest to the smallest value, from which an axis may be logarithmic
_CROWDED = 0.1
"""Part of a linear axis: if the lower half of the values would be crowded into it, the axis is logarithmic."""
_FENCE = 3.0  # interquartile ranges beyond which a value does not stretch the axis (Tukey's far out)
_LONGEST = 14  # characters of a label


@dataclass(frozen=True, slots=True)
class Axis:
    """A line from 0 to 1 with marks on it."""

    marks: Sequence[tuple[float, str]]
    """Places and texts."""
    low: float
    high: float
    """Values at the ends; with ``labels``, the first and the last index."""
    is_log: bool = False
    labels: Sequence[str] = ()
    """``repr`` of the values that are placed one after another; empty if they are placed by size."""

    @classmethod
    def of_numbers(cls, values: Sequence[float], *, whole: bool = False) -> Axis:
        """Return an axis for finite ``values``; only with ``whole`` do outliers stretch a linear axis."""
        low, high = min(values), max(values)
        if low > 0 and high / low >= _LOG_RATIO and statistics.median(values) - low < _CROWDED * (high - low):
            return cls.of_powers(low, high)
        if not whole:
            low, high = _fences(sorted(values))
        ticks = round_ticks(low, high)
        span = ticks[-1] - ticks[0]
        return cls([((tick - ticks[0]) / span, number_text(tick)) for tick in ticks], ticks[0], ticks[-1])

    @classmethod
    def of_powers(cls, low: float, high: float) -> Axis:
        """Return a logarithmic axis with ``low`` and ``high``, which are positive, between powers of ten."""
        first = math.floor(math.log10(low))
        last = max(first + 1, math.ceil(math.log10(high)))
        step = max(1, -(-(last - first) // 5))
        powers = range(first, last + 1, step)
        marks = [((power - first) / (last - first), f"{10.0**power:g}") for power in powers]
        return cls(marks, 10.0**first, 10.0**last, is_log=True)

    @classmethod
    def of_values(cls, values: Sequence[Any], *, is_log: bool = False) -> Axis:
        """Return an axis for any values: more than six different numbers placed by size, else one after another.

        Args:
            is_log: whether numbers are placed by their logarithms, if all are positive.
        """
        if is_log and all(isinstance(one, (int, float)) and one > 0 for one in values):
            return cls.of_powers(min(values), max(values))
        kinds = {repr(value): value for value in values}
        if len(kinds) > 6 and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values):
            return cls.of_numbers([float(value) for value in values], whole=True)
        numbers = all(isinstance(one, (int, float)) for one in values)
        ordered = sorted(kinds, key=lambda text: kinds[text]) if numbers else list(kinds)
        last = max(1, len(ordered) - 1)
        marks = [(place / last, shown(kinds[text], _LONGEST)) for place, text in enumerate(ordered)]
        return cls(marks, 0.0, float(last), labels=ordered)

    def place(self, value: Any) -> float:
        """Return where ``value`` is, from 0 to 1; a value beyond the end is at the end."""
        if self.labels:
            return self.labels.index(repr(value)) / self.high
        if self.is_log:
            return math.log(float(value) / self.low) / math.log(self.high / self.low)
        return min(1.0, max(0.0, (float(value) - self.low) / (self.high - self.low)))


def shown(value: Any, longest: int = 60) -> str:
    """Return a hyperparameter as text of at most ``longest`` characters: a text as it is, a class by its name."""
    if not isinstance(value, (str, type)) and not callable(value):
        return short(value, longest)
    text = " ".join(str(getattr(value, "__name__", value)).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _fences(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the values' range, without outliers (beyond Tukey's outer fences)."""
    quarter, three = (ordered[round(part * (len(ordered) - 1))] for part in (0.25, 0.75))
    reach = _FENCE * (three - quarter)
    if len(ordered) < 4 or not reach:
        return ordered[0], ordered[-1]
    return max(ordered[0], quarter - reach), min(ordered[-1], three + reach)
