"""``maggy.ablation``, and ``AblationConfig`` of ``maggy.config``, as a subclass of lagom's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lagom import config
from lagom.config import AblationStudy
from lagom.extensions.compat.maggy.settable_trials import SettableTrials

__all__ = ["AblationConfig", "AblationStudy"]

_NAMES = ("ablation_study", "ablator", "direction", "name", "description", "hb_interval", "model")


class AblationConfig(SettableTrials, config.AblationConfig):
    """Maggy's config of an ablation study, which takes any field of lagom's; ``seeds`` is 1 and ``direction``
    "max" unless they are given.

    As in Maggy, fields may be passed by position, and set afterwards.

    Args:
        positional: the fields in Maggy's order, which ends with ``model`` and ``dataset``, or before Maggy 1.1 with
            ``model``, ``train_set`` and ``test_set``.
        given: fields of lagom's config, and ``model`` for ``module``. ``dataset`` may be a list of any length.
    """

    sets: Sequence[Any] | None
    """``dataset``, if it is not a pair."""

    def __init__(self, *positional: Any, **given: Any) -> None:
        self._set_up(_NAMES, positional, given, name="ablationStudy", seeds=1, direction="max")
