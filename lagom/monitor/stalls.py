"""Ranks that make no progress: since when, and the text that says so.

A rank notices by itself in ``worker/heartbeat.py``, its host process in ``host/supervisor.py``; ``launchers/run.py``
shows the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lagom.wire.client import Message


@dataclass(slots=True)
class Pulse:
    """The time of a rank's last progress: a batch, a forward, a backward or output."""

    patience_s: float
    """Seconds without progress after which the rank counts as stalled."""
    ticks: int = -1
    moved_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)
    doing: Message | None = None
    """Its last message about its current activity."""
    stalls: bool = False

    def heard(self, ticks: int) -> None:
        """Take in a message of the rank, with its progress counter."""
        self.heard_at = time.monotonic()
        if ticks != self.ticks:
            self.ticks = ticks
            self.moved()

    def moved(self) -> None:
        """Record progress."""
        now = time.monotonic()
        if self.stalls:
            # The rank is just slow: a report at each of its steps would help nobody.
            self.patience_s = max(self.patience_s, 2 * (now - self.moved_at))
            self.stalls = False
        self.moved_at, self.doing = now, None

    @property
    def quiet_s(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self.moved_at


def stall_text(stalled: Mapping[int, Message], world_size: int) -> str:
    """Return the report about stalled ranks: which, for how long, where they are and which ranks wait for which.

    Each message has ``quiet_s`` and the result of ``lagom.worker.stack_dump.doing``.
    """
    stuck = {rank: one for rank, one in sorted(stalled.items()) if not one.get("waits")}
    waiting = [rank for rank in sorted(stalled) if rank not in stuck]
    seconds = max(one["quiet_s"] for one in stalled.values())
    parts = []
    places = _by({rank: stalled[rank] for rank in waiting}, exchange)
    where = f" in {next(iter(places))}" if len(places) == 1 and "" not in places else ""
    if stuck:
        they = f"; {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it{where}" if waiting else ""
        parts.append(f"{_ranks(list(stuck))} made no progress for {seconds:.0f} s{they}")
    else:
        missing = {rank for one in stalled.values() for rank in one.get("missing") or ()}
        others = sorted(missing - set(waiting)) or [rank for rank in range(world_size) if rank not in stalled]
        they = f"; {_ranks(others)} did not come" if others else ", every one for others"
        parts.append(f"{_ranks(waiting)} waited for other ranks for {seconds:.0f} s{where}{they}")
    if not where:
        parts += [f"{_ranks(ranks)} in {place}" for place, ranks in places.items() if place]
    shown = stuck or {rank: stalled[rank] for rank in waiting}
    lines = _by(stalled, lambda one: str(one.get("line") or ""))
    parts += [f"{_ranks(ranks)} at {line}" for line, ranks in lines.items() if line]
    parts += [f"rank {rank}: {one['state']}" for rank, one in shown.items() if one.get("state")]
    rank, one = next(iter(shown.items()))
    parts.append(f"the stack of rank {rank}:\n{stack(one)}".rstrip())
    return "\n".join(parts)


def stack(one: Message) -> str:
    """Return the stacks in a message, as text."""
    return (str(one.get("stack") or "") or "(it did not say)\n") + str(one.get("children") or "")


def exchange(one: Message) -> str:
    """Return the exchange in which a rank waits, as "exchange 47 of 1200 bytes (gradients)"; may be empty."""
    name, _, rest = str(one.get("exchange") or "").partition(" ")
    if not name:
        return ""
    purpose = f" ({one['purpose']})" if one.get("purpose") else ""
    return f"{name} {one.get('number')}{' ' * bool(rest)}{rest}{purpose}"


def _by(stalled: Mapping[int, Message], what: Callable[[Message], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, one in sorted(stalled.items()):
        found.setdefault(what(one), []).append(rank)
    return found


def ranks_of(numbers: Sequence[int]) -> str:
    """ "rank 0", "ranks 0-3", "ranks 0, 2"."""
    return _ranks(numbers)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
