"""``lagom.host.stall_detector``: when a rank counts as stalled."""

from __future__ import annotations

from lagom.host.stall_detector import Pulse


def test_one_that_is_always_slow_is_named_once() -> None:
    pulse = Pulse(patience_s=1.0)
    pulse.moved_at -= 5.0
    pulse.stalls = True
    pulse.heard(1)
    assert not pulse.stalls
    assert pulse.patience_s >= 10.0
    pulse.moved_at -= 6.0
    assert pulse.quiet_s < pulse.patience_s
