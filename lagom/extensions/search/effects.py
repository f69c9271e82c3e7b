"""``effect``: change of the metric when a component is left out, with a confidence interval over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Values = Mapping[int, float]
"""Metrics by the index of the seed in the study."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """Change of the metric by leaving one component out."""

    component: str
    value: float | None
    """Mean metric without the component; None if no trial has ended well."""
    difference: float | None = None
    """Mean over seeds of the metric without the component minus the base's metric; None if ``num_seeds`` is 0."""
    low: float | None = None
    high: float | None = None
    """Ends of the confidence interval of ``difference``; None with fewer than two seeds."""
    num_seeds: int = 0
    """Number of seeds that have both metrics, with a finite difference."""


def effect(component: str, base: Values, values: Values, confidence: float = 0.95) -> Effect:
    """Compare the metrics without a component with the base's, seed by seed.

    The interval is Student's for the mean of the paired differences d_1 ... d_n,

        mean(d) -/+ t(n - 1) * stdev(d) / sqrt(n)

    (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2, "Confidence Limits for the Mean"; pairs as in 7.3.1).
    The interval is right if the differences are independent and about normally distributed.
    """
    mean = statistics.fmean(values.values()) if values else None
    pairs = [values[seed] - base[seed] for seed in base if seed in values]
    pairs = [one for one in pairs if math.isfinite(one)]
    if not pairs:
        return Effect(component=component, value=mean)
    difference = statistics.fmean(pairs)
    low = high = None
    if len(pairs) > 1:
        half = t_quantile(len(pairs) - 1, confidence) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        low, high = difference - half, difference + half
    return Effect(component=component, value=mean, difference=difference, low=low, high=high, num_seeds=len(pairs))


def t_quantile(degrees: int, confidence: float) -> float:
    """Return the t for which Student's distribution has the probability ``confidence`` between -t and t.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4, solved for t by bisection.
    """
    low, high = 0.0, math.pi / 2  # bounds of the angle whose tangent is t / sqrt(degrees)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(degrees, middle) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _probability(degrees: int, angle: float) -> float:
    """Return the probability of |t| < tan(angle) * sqrt(degrees)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for number in range(odd, degrees - 1, 2):
        total += term
        term *= (number + 1) / (number + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def is_seed_ignored(all_values: Sequence[Values]) -> bool:
    """Return whether seeds never change a variant's metric; False if no variant has metrics for two seeds."""
    several = [set(values.values()) for values in all_values if len(values) > 1]
    return bool(several) and all(len(found) == 1 for found in several)
