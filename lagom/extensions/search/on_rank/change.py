"""``HparamsChange``: the hyperparameters of one trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lagom.program.signature import Call


@dataclass(frozen=True, slots=True)
class HparamsChange:
    """Adds the hyperparameters ``params`` to a call, which has the hyperparameters that all trials share."""

    params: Mapping[str, Any]

    def __call__(self, call: Call) -> Call:
        """Return ``call`` with the trial's hyperparameters."""
        hparams = {**call.provided["hparams"], **self.params}
        return dataclasses.replace(call, provided={**call.provided, "hparams": hparams})
