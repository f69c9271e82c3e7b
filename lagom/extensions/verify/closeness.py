"""Arithmetic on two numbers, or two sketches: whether they are almost equal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from lagom.extensions.verify.on_rank.record import Sketch

NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
"""Matches a number in a text; also an address, which differs in each process."""


def tolerance(step: int, epsilon: float) -> float:
    """Return the relative error allowed after ``step`` backwards at machine epsilon ``epsilon``: errors grow."""
    base, most = (1e-9, 1e-4) if epsilon < 1e-12 else (1e-4, 0.05) if epsilon < 1e-5 else (0.02, 0.2)
    return min(base * 1.5**step, most)


def is_near(left: float, right: float, relative: float, scale: float, absolute: float = 0.0) -> bool:
    """Return whether both numbers are almost equal, or the same non-finite value.

    They may differ by ``relative`` * (the larger size + ``scale``) + ``absolute``.
    """
    if not (math.isfinite(left) and math.isfinite(right)):
        return repr(left) == repr(right)
    return abs(left - right) <= relative * (max(abs(left), abs(right)) + scale) + absolute


def norm(values: Iterable[float]) -> float:
    """Return the Euclidean norm of ``values``."""
    return math.sqrt(sum(value * value for value in values))


def difference(left: Sketch, right: Sketch) -> Sketch:
    """Return ``left - right``; an empty sketch counts as zeros."""
    if len(left) != len(right):
        left, right = left or (0.0,) * len(right), right or (0.0,) * len(left)
    return tuple(a - b for a, b in zip(left, right, strict=False))


def distance(left: Sketch, right: Sketch) -> float:
    """Return the norm of the difference."""
    return norm(difference(left, right))


def both_bad(left: Sketch, right: Sketch) -> bool:
    """Return whether both sides have non-finite values: a program that runs into NaN does so everywhere."""
    return not math.isfinite(sum(left)) and not math.isfinite(sum(right))


def same_printed(left: str, right: str, allowed: float) -> bool:
    """Return whether two texts of a number are equal, up to rounding of the last digit; addresses always are.

    Args:
        allowed: relative error beside the rounding.
    """
    if left == right or left.startswith("0x"):
        return True
    if right.startswith("0x"):
        return False
    digits, _, exponent = left.lower().partition("e")
    # At least 1e-12, since a zero with a rounding error is printed in exponent notation. float() cannot overflow.
    unit = max(float(f"1e{int(exponent or 0) - len(digits.partition('.')[2])}"), 1e-12) if "." in digits else 0.0
    return is_near(float(left), float(right), allowed, 0.0, 1.01 * unit)
