"""``is_smaller_better``: whether a metric's name means a loss or an error, which a search minimises."""

from __future__ import annotations

import re

_PARTS = ("loss", "error", "perplexity", "crossentropy")
"""Texts that mean a loss or an error anywhere in the letters of a name, as in "valloss"."""
_WORDS = frozenset(
    (
        *("nll", "ppl", "bpc", "bpb", "mse", "mae", "rmse", "mape", "smape", "msle", "rmsle", "wer", "cer", "fid"),
        *("deviance", "regret", "brier"),
    )
)
"""Words of a name that mean a loss or an error."""
_NEGATED = frozenset(["neg", "negated", "minus"])
"""Words that turn a loss into a score, as in scikit-learn's "neg_mean_squared_error"."""


def is_smaller_better(metric: str) -> bool:
    """Return whether the name ``metric`` means a loss or an error: loss, error, mse, mae, rmse, perplexity, ..."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", metric).lower())
    if _NEGATED.intersection(words):
        return False
    letters = "".join(words)
    return any(part in letters for part in _PARTS) or any(word in _WORDS or word.endswith("err") for word in words)
