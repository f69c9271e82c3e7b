"""``lagom.extensions.observe.tracking.rank0_answers``: how long a rank waits for rank 0's answer."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from lagom.errors import LagomError
from lagom.exchange.run_store import SealedStore
from lagom.extensions.observe.tracking.rank0_answers import Answers


@pytest.mark.parametrize("debug", [None, "first", 0])
def test_only_in_a_debugged_run_rank_0_may_take_hours(debug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(
        notes=SealedStore(HashStore(), b""), world_size=2, config=SimpleNamespace(debug=debug)
    )
    answers = Answers(session, "mlflow")
    hours = itertools.count()

    def an_hour_later() -> float:
        if (hour := next(hours)) == 4:
            answers.give("a key", "", lambda: 7)
        return hour * 3600.0

    monkeypatch.setattr(time, "monotonic", an_hour_later)
    if debug is None:
        with pytest.raises(LagomError, match="rank 0 has not asked for in 1800 s"):
            answers.receive("a key")
    else:
        answer = answers.receive("a key")
        assert answer is not None
        assert answer.value == 7
