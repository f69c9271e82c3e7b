"""``is_smaller_better``: whether a metric's name means a loss or an error, which a search minimises."""

from __future__ import annotations

import re

_ENDINGS = ("loss", "losses", "error", "errors", "err", "perplexity", "divergence")
"""Ends of a word that means a loss or an error, as in "valloss"."""
_PARTS = ("crossentropy", "negativeloglikelihood", "meansquared", "meanabsolute")
"""Texts that mean a loss or an error anywhere in the letters of a name."""
_WORDS = frozenset(
    (
        *("nll", "ppl", "bpc", "bpb", "mse", "mae", "rmse", "mape", "smape", "msle", "rmsle", "wer", "cer", "fid"),
        *("deviance", "regret", "brier", "eer", "ece", "fpr", "fnr", "hamming", "kl", "kld"),
    )
)
"""Words of a name that mean a loss or an error."""
_NEGATED = frozenset(["neg", "negated", "minus", "reduction", "improvement"])
"""Words that turn a loss into a score, as in scikit-learn's "neg_mean_squared_error"."""


def is_smaller_better(metric: str) -> bool:
    """Return whether the name ``metric`` means a loss or an error: loss, error, mse, mae, rmse, perplexity, ..."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", metric).lower())
    if _NEGATED.intersection(words):
        return False
    letters = "".join(words)
    return any(part in letters for part in _PARTS) or any(word in _WORDS or word.endswith(_ENDINGS) for word in words)
